"""Serves an environment of the package `verifiers` (0.4) as an agent behind a URL. It runs in that package's own virtual environment.

    VENV/bin/python serve.py tasks --taskset gsm8k --count 1000 > tasks.jsonl
    VENV/bin/python serve.py serve --taskset gsm8k --tokenizer MODEL_DIR --port 8600

The first writes the tasks as prompts of a run; the second plays them: the environment's own code runs unchanged, its model calls go to the
gateway token by token (``POST /inference/v1/generate``), and the reward is the environment's. This file needs `verifiers` and nothing of
Myxo: the two packages' requirements do not fit into one environment.
"""

import argparse
import asyncio
import itertools
import json
import os
import sys
import threading
import traceback
from typing import Any

import verifiers.v1 as vf
from aiohttp import web

KEY_VARIABLE = "MYXO_SESSION_KEY_"
"""The beginning of the names of the variables that hold sessions' keys: verifiers reads keys from the environment alone."""


class Episodes:
    """Plays episodes of one environment.

    Args:
        config: the environment's, as verifiers' TOML has it below ``[env]``. tokenizer: directory of the model's. sampling: what the
            session's own sampling does not say.
    """

    def __init__(self, config: dict[str, Any], tokenizer: str, sampling: dict[str, Any]) -> None:
        self.environment = vf.load_environment(vf.resolve_env_config(config))
        self._tokenizer, self._sampling = tokenizer, sampling
        self._tasks: dict[int, Any] = {}
        self._unread = iter(self.environment.taskset)
        self._reading, self._numbers = threading.Lock(), itertools.count()

    async def play(self, request: web.Request) -> web.Response:
        """Plays the task that the request's metadata names, and answers its reward."""
        try:
            asked = await request.json()
            model, base_url, api_key = asked["data"]["model"], asked["base_url"], asked["api_key"]
            task = await asyncio.to_thread(self.task, int(asked["data"]["metadata"]["verifiers"]["idx"]))
        except (KeyError, TypeError, ValueError, IndexError) as error:
            expected = "data.model, data.metadata.verifiers.idx, base_url and api_key"
            return web.json_response({"error": f"expected {expected}: {type(error).__name__}: {error}"}, status=400)
        variable = f"{KEY_VARIABLE}{next(self._numbers)}"
        os.environ[variable] = api_key
        try:
            return self._result(await self._episode(task, model, base_url, variable))
        except Exception as error:
            traceback.print_exc()
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
        finally:
            del os.environ[variable]

    def task(self, index: int) -> Any:
        """Returns the task of that number. Raises IndexError where there are fewer."""
        with self._reading:  # threads of several rollouts read the one taskset
            while index not in self._tasks:
                found = next(self._unread, None)
                if found is None:
                    raise IndexError(f"the taskset has no task {index}")
                self._tasks[found.data.idx] = found
            return self._tasks[index]

    async def _episode(self, task: Any, model: str, base_url: str, variable: str) -> Any:
        client = vf.TrainClientConfig(base_url=base_url, api_key_var=variable, renderer_model_name=self._tokenizer)
        context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(**self._sampling))
        return await self.environment.run_episode(task, context)

    @staticmethod
    def _result(episode: Any) -> web.Response:
        """Answers the sum of all rewards and, by name, those of the traces; an episode that failed has none."""
        if not episode.ok:
            errors = [error.message.strip() for one in (episode, *episode.traces) for error in one.errors if error.message.strip()]
            print("an episode failed:", *errors, sep="\n", file=sys.stderr, flush=True)
            last = errors[-1].splitlines()[-1] if errors else "the episode did not end"  # of a traceback, what it says
            return web.json_response({"error": last}, status=500)
        parts = {name: float(reward.value) for trace in episode.traces for name, reward in trace.rewards.items() if reward is not None}
        return web.json_response({"reward": {"reward": sum(trace.reward for trace in episode.traces), **parts}})


async def served(episodes: Episodes, host: str, port: int) -> None:
    """Serves until the process is ended."""
    application = web.Application(client_max_size=64 * 2**20)
    application.router.add_post("/play", episodes.play)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    async with episodes.environment.serving():
        await runner.setup()
        await web.TCPSite(runner, host, port).start()
        print(f"{episodes.environment.config.env_id} at http://{host}:{runner.addresses[0][1]}/play", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()


def rows(taskset: Any, count: int) -> None:
    """Prints the first tasks as rows of a run's prompts."""
    for task in itertools.islice(taskset, count):
        data = task.data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        prompt = (
            data.prompt if isinstance(data.prompt, str) else json.dumps(data.prompt) if data.prompt else data.name or f"task {data.idx}"
        )
        messages.append({"role": "user", "content": prompt})
        place = {"taskset": taskset.config.id, "idx": data.idx, "key": task.key}
        print(json.dumps({"prompt": messages, "metadata": {"verifiers": place}}, ensure_ascii=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tasks", "serve"])
    parser.add_argument("--taskset", required=True, help="its id: the name of the installed package")
    parser.add_argument("--env", type=json.loads, default={}, help="more of verifiers' [env] section, as JSON")
    parser.add_argument("--count", type=int, default=1000, help="tasks: how many")
    parser.add_argument("--tokenizer", default="", help="serve: the directory of the model's tokenizer")
    parser.add_argument("--sampling", type=json.loads, default={}, help="serve: sampling as JSON, where not the run's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8600, help="0: one that is free, which is printed")
    given = parser.parse_args()
    config = {**given.env, "taskset": {**given.env.get("taskset", {}), "id": given.taskset}}
    episodes = Episodes(config, given.tokenizer, given.sampling)
    if given.command == "tasks":
        rows(episodes.environment.taskset, given.count)
    elif not given.tokenizer:
        sys.exit("serve needs --tokenizer: the directory of the model's tokenizer, from which its renderer is chosen")
    else:
        asyncio.run(served(episodes, given.host, given.port))


if __name__ == "__main__":
    main()
