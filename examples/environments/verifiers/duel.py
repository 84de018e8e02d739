"""A taskset of verifiers with two agents that play against each other: each writes a line, and the one with more digits in it wins.

A whole example of agents with rewards of their own, small enough for a tiny model. `serve.py` finds it beside itself.
"""

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["DuelEnv", "DuelTaskset"]

RULES = "Write one line. The player with more digits in it wins."


class DuelTask(vf.Task[vf.TaskData]):
    """A round."""


class DuelConfig(vf.TasksetConfig):
    """It has no settings."""


class DuelTaskset(vf.Taskset[DuelTask, DuelConfig]):
    """Rounds without end, all alike."""

    INFINITE = True

    def load(self) -> Iterator[DuelTask]:
        index = 0
        while True:
            yield DuelTask(vf.TaskData(idx=index, name=f"round {index}", prompt=None))
            index += 1


class DuelEnvConfig(vf.EnvConfig):
    """The two agents: chats without tools, in processes of this machine."""

    left: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})
    right: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class DuelEnv(vf.Env[DuelEnvConfig]):
    """One round: both write, neither sees what the other has written."""

    async def run(self, task: Any, agents: Any) -> None:
        traces, replies = zip(*await asyncio.gather(said(agents.left, task), said(agents.right, task)), strict=True)
        digits = [sum(character.isdigit() for character in reply) for reply in replies]
        won = float((digits[0] > digits[1]) - (digits[0] < digits[1]))
        for trace, reward in zip(traces, (won, -won), strict=True):
            trace.record_reward("won", reward)


async def said(agent: Any, task: Any) -> tuple[Any, str]:
    """Returns an agent's trace and its line."""
    own = vf.Task(vf.TaskData(idx=task.data.idx, prompt=None, system_prompt=RULES))
    async with agent.interaction(own) as interaction:
        segment = await interaction.turn("Your line:")
        return interaction.trace, segment.last_reply
