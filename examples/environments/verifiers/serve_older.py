"""Serves an environment of verifiers 0.1 (`load_environment`) as an agent behind a URL. It runs in that package's own virtual environment.

    VENV/bin/python serve_older.py tasks --environment my_environment --count 1000 > tasks.jsonl
    VENV/bin/python serve_older.py serve --environment my_environment --port 8600

The environment's own code runs unchanged, as a client of OpenAI's chat completions at the gateway; the reward is that of its rubric, and
each of its metrics stands beside it. For environments of `verifiers.v1` there is `serve.py`, which asks token by token.
"""

import argparse
import asyncio
import json
import traceback
from typing import Any

import verifiers as vf
from aiohttp import web
from openai import AsyncOpenAI
from verifiers.clients import OpenAIChatCompletionsClient


class Rollouts:
    """Plays the rows of an environment's dataset. ``sampling``: what a request asks beside the run's own."""

    def __init__(self, environment: Any, sampling: dict[str, Any]) -> None:
        self.environment, self._sampling = environment, sampling
        self._rows = environment.get_dataset()

    async def play(self, request: web.Request) -> web.Response:
        """Plays the row that the request's metadata names, and answers its reward; a rollout that failed has none."""
        asked = await request.json()
        try:
            row = dict(self._rows[int(asked["data"]["metadata"]["verifiers"]["idx"])])
            where, model = {"base_url": asked["base_url"], "api_key": asked["api_key"]}, asked["data"]["model"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            expected = "data.model, data.metadata.verifiers.idx, base_url and api_key"
            return web.json_response({"error": f"expected {expected}: {type(error).__name__}: {error}"}, status=400)
        try:
            async with AsyncOpenAI(**where, max_retries=8) as client:
                state = await self.environment.run_rollout(row, OpenAIChatCompletionsClient(client), model, dict(self._sampling))
            if state.get("error"):
                raise RuntimeError(str(state["error"]))
        except Exception as error:
            traceback.print_exc()
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
        parts = {name: float(value) for name, value in (state.get("metrics") or {}).items() if value is not None}
        return web.json_response({"reward": {**parts, "reward": float(state["reward"])}})

    def rows(self, count: int) -> None:
        """Prints the first rows as a run's prompts."""
        for index, row in enumerate(self._rows.select(range(min(count, len(self._rows))))):
            place = {"environment": self.environment.env_id, "idx": index}
            print(json.dumps({"prompt": row["prompt"], "metadata": {"verifiers": place}}, ensure_ascii=False))


async def served(application: web.Application, name: str, host: str, port: int) -> None:
    """Serves until the process is ended."""
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    print(f"{name} at http://{host}:{runner.addresses[0][1]}/play", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tasks", "serve"])
    parser.add_argument("--environment", required=True, help="the name of the installed package")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of its load_environment, as JSON")
    parser.add_argument("--count", type=int, default=1000, help="tasks: how many")
    parser.add_argument("--sampling", type=json.loads, default={}, help="serve: sampling as JSON, where not the run's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8600, help="0: one that is free, which is printed")
    given = parser.parse_args()
    rollouts = Rollouts(vf.load_environment(given.environment, **given.arguments), given.sampling)
    if given.command == "tasks":
        rollouts.rows(given.count)
    else:
        application = web.Application(client_max_size=64 * 2**20)
        application.router.add_post("/play", rollouts.play)
        asyncio.run(served(application, given.environment, given.host, given.port))


if __name__ == "__main__":
    main()
