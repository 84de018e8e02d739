"""A taskset of verifiers 0.4 whose tasks are the features of `play`, with its tool."""

import verifiers.v1 as vf
from play import ASK, SUM, add

__all__ = ["AddingTaskset"]

FEATURES = ("chat", "tools", "parallel", "reasoning")


class AddingTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        return add(a, b)


class AddingTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AddingTask(vf.Task[vf.TaskData, vf.State, AddingTaskConfig]):
    @classmethod
    def toolsets(cls, config: AddingTaskConfig) -> list[vf.Toolset]:
        return [AddingTools(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == SUM)

    @vf.reward(weight=1.0)
    async def added(self, trace: vf.Trace) -> float:
        return float(len(trace.tool_messages))


class AddingConfig(vf.TasksetConfig):
    task: AddingTaskConfig = AddingTaskConfig()


class AddingTaskset(vf.Taskset[AddingTask, AddingConfig]):
    def load(self) -> list[AddingTask]:
        return [AddingTask(vf.TaskData(idx=index, prompt=ASK[name]), self.config.task) for index, name in enumerate(FEATURES)]


if __name__ == "__main__":
    AddingTools.run()
