"""Serves an environment of the package `verifiers` (0.4) as an agent behind a URL. It runs in that package's own virtual environment.

    VENV/bin/python serve.py tasks --taskset gsm8k --count 1000 > tasks.jsonl
    VENV/bin/python serve.py serve --taskset gsm8k --tokenizer MODEL_DIR --port 8600

The first writes the tasks as prompts of a run; the second plays them: the environment's own code runs unchanged, its model calls go to the
gateway token by token (``POST /inference/v1/generate``), and the rewards are the environment's. This file needs `verifiers` and nothing of
Myxo: the two packages' requirements do not fit into one environment.
"""

import argparse
import asyncio
import importlib.util
import itertools
import json
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import aiohttp
import verifiers.v1 as vf
from aiohttp import web

TRACE_HEADER = "X-Session-ID"
"""In each model call: the id of the trace, verifiers' record of one agent's part, that it belongs to."""

NO_KEY = "MYXO_NO_KEY"
"""The variable that verifiers looks for a key in; the calls get theirs on the way."""

HOP_HEADERS = {"host", "authorization", "connection", "content-length", "transfer-encoding", "keep-alive"}
"""Those that belong to one connection, or to one side of `Forwarder`."""


ADD = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]},
}
CALL = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
ASKED = {"role": "user", "content": "What is 1 + 2?"}
PROBES: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]]], ...] = (
    ([{"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "3."}, {"role": "user", "content": "Sure?"}], []),
    ([ASKED], [{"type": "function", "function": ADD}]),
    (
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_0", "content": "3"}],
        [{"type": "function", "function": ADD}],
    ),
)
"""Conversations and tools that a renderer and the model's chat template must write alike."""


def renderer_of(tokenizer: str, name: str) -> Any:
    """Returns the configuration of a tokenizer's renderer: the one of that name, or, for ``auto``, the first that writes the probes as the
    chat template does. For a directory the package itself would take one that has no tools. Raises SystemExit for an unknown name, and
    for a renderer that writes them otherwise."""
    from renderers import RendererConfig, create_renderer
    from renderers.base import load_tokenizer

    known = {one.model_fields["name"].default: one for one in get_args(get_args(RendererConfig)[0])}
    families = [family for family in known if family not in ("auto", "default", "custom")]
    if name not in ("auto", "default", *families):
        sys.exit(f"--renderer {name}: expected auto, default or one of {', '.join(families)}")
    if name == "default":
        return known[name]()
    if not (Path(tokenizer).is_dir() or "/" in tokenizer.lstrip("./")):
        sys.exit(f"--tokenizer {tokenizer}: expected the directory of a model's tokenizer, or OWNER/NAME on the hub")
    loaded = load_tokenizer(tokenizer)
    expected = [written(loaded.apply_chat_template, messages, tools, tokenize=True, return_dict=False) for messages, tools in PROBES]
    for family in families if name == "auto" else [name]:
        try:
            renderer = create_renderer(loaded, known[family]())
        except Exception as error:  # one for other tokens fails in its own way
            found: list[Any] = [f"{type(error).__name__}: {error}"]
        else:
            found = [written(renderer.render_ids, messages, tools) for messages, tools in PROBES]
        if found == expected and None not in found:
            return known[family]()
    if name == "auto":
        print("no renderer writes tools as this model's chat template does: harnesses with tools are refused", file=sys.stderr)
        return known["default"]()
    different = next((text for text, wanted in zip(found, expected, strict=False) if text != wanted), found[0])
    said = loaded.decode(different) if isinstance(different, list) else different
    sys.exit(f"--renderer {name} does not write this model's chat form (auto finds one that does, if any): {said!r}")


def written(render: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]], **options: Any) -> list[int] | None:
    """Returns the ids of a probe; None where it is refused."""
    try:
        return list(render(messages, tools=tools or None, add_generation_prompt=True, **options))
    except Exception:  # templates and renderers raise what they like
        return None


def check_installed(taskset: str) -> None:
    """Raises SystemExit where a taskset's package is not installed, or is an environment of verifiers before `verifiers.v1`: what
    verifiers says of them names another cause."""
    module = taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    if importlib.util.find_spec(f"verifiers.v1.tasksets.{module}"):
        return
    if (spec := importlib.util.find_spec(module)) is None:
        hub = f"prime env install {taskset}" if "/" in taskset else f"prime env install OWNER/{taskset}"
        sys.exit(
            f"{sys.prefix} has no package {module}: install it there with pip, or from the environments hub, where that is reached: {hub}"
        )
    directory = Path(spec.origin).parent if spec and spec.origin and spec.submodule_search_locations else None
    sources = list(directory.rglob("*.py")) if directory else [Path(spec.origin)] if spec and spec.origin else []
    texts = [source.read_text(errors="replace") for source in sources]
    if any("def load_environment" in text for text in texts) and not any("verifiers.v1" in text for text in texts):
        sys.exit(
            f"{module} is an environment of verifiers 0.1 (load_environment, and no taskset of verifiers.v1), which 0.4 cannot play: "
            "install it with verifiers<0.2 into a virtual environment of its own, and serve it by serve_older.py beside this file"
        )


@dataclass
class Rollout:
    """A rollout that is played. ``keys``: of the gateway's sessions by the agent's name, ``key`` that of all others."""

    base_url: str
    key: str
    keys: Mapping[str, str]
    traces: set[str] = field(default_factory=set)
    problem: str = ""

    @classmethod
    def of(cls, asked: Any, agents: Iterable[str]) -> "Rollout":
        """Returns what a request asks for. Raises ValueError where its roles are not the environment's agents."""
        keys = asked["data"].get("roles") or {}
        if keys and set(keys) != set(agents):
            raise ValueError(f"agent_roles = {', '.join(keys)}; the agents of the environment are {', '.join(agents)}")
        return cls(asked["base_url"].removesuffix("/v1"), asked["api_key"], keys)


class Forwarder:
    """Takes the model calls of all rollouts and sends each on to its gateway, with the key of its session.

    verifiers keeps a client for each endpoint and key that it has seen, and reads keys from the process's environment alone.
    """

    def __init__(self) -> None:
        self._rollouts: dict[str, Rollout] = {}
        self._agents: dict[str, str] = {}
        self.url = ""
        self.session: aiohttp.ClientSession | None = None

    def begin(self, rollout: Rollout, trace: Any) -> None:
        """Notes whose trace it is. What an agent that is not to be trained asks is refused: it would be trained."""
        if trace.agent.trainable:
            self._rollouts[trace.id], self._agents[trace.id] = rollout, trace.agent.name
            rollout.traces.add(trace.id)
        else:
            rollout.problem = f"the agent {trace.agent.name} is not trained: give it a model and a client of its own in --env"

    def end(self, rollout: Rollout) -> None:
        """Forgets a rollout's traces."""
        for trace in rollout.traces:
            del self._rollouts[trace], self._agents[trace]

    async def serve(self, runner: web.AppRunner) -> None:
        """Listens on this machine alone."""
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"

    async def forward(self, request: web.Request) -> web.Response:
        """Answers as the gateway does."""
        trace = request.headers.get(TRACE_HEADER, "")
        if trace not in self._rollouts and request.method == "GET":
            trace = next(iter(self._rollouts), "")  # the models are those of the run, whoever asks
        if trace not in self._rollouts:
            return web.json_response({"error": {"message": f"no rollout has a trace {trace!r} that is trained"}}, status=403)
        rollout = self._rollouts[trace]
        key = rollout.keys.get(self._agents[trace], rollout.key)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        sent = {"data": await request.read(), "headers": {**headers, "Authorization": f"Bearer {key}"}}
        try:
            assert self.session is not None
            async with self.session.request(request.method, rollout.base_url + request.path_qs, **sent) as answer:
                body = await answer.read()
        except aiohttp.ClientError as error:
            return web.json_response({"error": {"message": f"the gateway is away: {error}"}}, status=502)
        told = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS | {"content-encoding"}}
        return web.Response(status=answer.status, body=body, headers=told)


class Episodes:
    """Plays episodes of one environment.

    Args:
        config: the environment's, as verifiers' TOML has it below ``[env]``. tokenizer: directory of the model's. sampling: what the
            session's own sampling does not say. renderer: its configuration.
    """

    def __init__(self, config: dict[str, Any], tokenizer: str, sampling: dict[str, Any], renderer: Any = None) -> None:
        self.environment, self.forwarder = vf.load_environment(vf.resolve_env_config(config)), Forwarder()
        self.agents = [name for name, agent in self.environment.config if isinstance(agent, vf.AgentConfig) and agent.client is None]
        self._tokenizer, self._sampling, self._renderer = tokenizer, sampling, renderer
        self._tasks: dict[int, Any] = {}
        self._unread = iter(self.environment.taskset)
        self._reading = threading.Lock()

    async def play(self, request: web.Request) -> web.Response:
        """Plays the task that the request's metadata names, and answers its reward, or that of each role."""
        try:
            asked = await request.json()
            rollout, model = Rollout.of(asked, self.agents), asked["data"]["model"]
            task = await asyncio.to_thread(self.task, int(asked["data"]["metadata"]["verifiers"]["idx"]))
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            expected = "data.model, data.metadata.verifiers.idx, base_url and api_key"
            return web.json_response({"error": f"expected {expected}: {type(error).__name__}: {error}"}, status=400)
        try:
            return self._result(await self._episode(task, model, rollout), rollout)
        except Exception as error:
            traceback.print_exc()
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)
        finally:
            self.forwarder.end(rollout)

    def task(self, index: int) -> Any:
        """Returns the task of that number. Raises IndexError where there are fewer."""
        with self._reading:  # threads of several rollouts read the one taskset
            while index not in self._tasks:
                found = next(self._unread, None)
                if found is None:
                    raise IndexError(f"the taskset has no task {index}")
                self._tasks[found.data.idx] = found
            return self._tasks[index]

    async def _episode(self, task: Any, model: str, rollout: Rollout) -> Any:
        own = {"renderer_model_name": self._tokenizer, "renderer": self._renderer}
        client = vf.TrainClientConfig(base_url=self.forwarder.url, api_key_var=NO_KEY, **own)
        context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(**self._sampling))

        def discard(trace: Any) -> None:
            rollout.problem = f"the agent {trace.agent.name} began anew, and what it had drawn before would be trained, too"

        minted = lambda trace: self.forwarder.begin(rollout, trace)  # noqa: E731
        return await self.environment.run_episode(task, context, on_trace=minted, on_discard=discard)

    @staticmethod
    def _result(episode: Any, rollout: Rollout) -> web.Response:
        """Answers the rewards of the traces, all together or by role; an episode that failed has none."""
        if rollout.problem or not episode.ok:
            errors = [error.message.strip() for one in (episode, *episode.traces) for error in one.errors if error.message.strip()]
            print("an episode failed:", *errors, rollout.problem, sep="\n", file=sys.stderr, flush=True)
            last = errors[-1].splitlines()[-1] if errors else "the episode did not end"  # of a traceback, what it says
            return web.json_response({"error": rollout.problem or last}, status=500)
        by_agent = episode.by_agent
        rewards = {role: total(by_agent.get(role, ())) for role in rollout.keys}
        return web.json_response({"reward": rewards or total(episode.traces)})


def total(traces: Sequence[Any]) -> dict[str, float]:
    """Returns the sum of traces' rewards, and beside it that of each name."""
    found = {"reward": 0.0}
    for trace in traces:
        for name, reward in trace.rewards.items():
            found[name] = found.get(name, 0.0) + (0.0 if reward is None else float(reward.value))
    return found | {"reward": float(sum(trace.reward for trace in traces))}


async def served(episodes: Episodes, host: str, port: int) -> None:
    """Serves until the process is ended."""
    application, calls = web.Application(client_max_size=64 * 2**20), web.Application(client_max_size=64 * 2**20)
    application.router.add_post("/play", episodes.play)
    calls.router.add_route("*", "/{path:.*}", episodes.forwarder.forward)
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
    forwarding = web.AppRunner(calls, handler_cancellation=True, access_log=None)
    connector, forever = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None, connect=60)
    async with aiohttp.ClientSession(connector=connector, timeout=forever) as episodes.forwarder.session:
        await episodes.forwarder.serve(forwarding)
        try:
            async with episodes.environment.serving():
                await runner.setup()
                await web.TCPSite(runner, host, port).start()
                print(f"{episodes.environment.config.env_id} at http://{host}:{runner.addresses[0][1]}/play", flush=True)
                await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            await forwarding.cleanup()


def rows(taskset: Any, count: int) -> None:
    """Prints the first tasks as rows of a run's prompts."""
    for task in itertools.islice(taskset, count):
        data = task.data
        messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str) or not data.prompt:
            messages.append({"role": "user", "content": data.prompt or data.name or f"task {data.idx}"})
        else:
            messages += [{"role": message.role, "content": text_of(message.content)} for message in data.prompt]
        place = {"taskset": taskset.config.id, "idx": data.idx, "key": task.key}
        print(json.dumps({"prompt": messages, "metadata": {"verifiers": place}}, ensure_ascii=False))


def text_of(content: Any) -> str:
    """Returns a message's text; parts that are none are named."""
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(getattr(part, "text", None) or f"[{getattr(part, 'type', 'part')}]" for part in content)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["tasks", "serve"])
    parser.add_argument("--taskset", required=True, help="its id: the name of the installed package")
    parser.add_argument("--env", type=json.loads, default={}, help="more of verifiers' [env] section, as JSON")
    parser.add_argument("--count", type=int, default=1000, help="tasks: how many")
    parser.add_argument("--tokenizer", default="", help="serve: the directory of the model's tokenizer")
    parser.add_argument("--renderer", default="auto", help="serve: which of the package renderers writes the model's chat form")
    parser.add_argument("--sampling", type=json.loads, default={}, help="serve: sampling as JSON, where not the run's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8600, help="0: one that is free, which is printed")
    given = parser.parse_args()
    config = {**given.env, "taskset": {**given.env.get("taskset", {}), "id": given.taskset}}
    check_installed(given.taskset)
    if given.command == "serve" and not given.tokenizer:
        sys.exit("serve needs --tokenizer: the directory of the model's tokenizer, from which its renderer is chosen")
    renderer = renderer_of(given.tokenizer, given.renderer) if given.command == "serve" else None
    episodes = Episodes(config, given.tokenizer, given.sampling, renderer)
    if given.command == "tasks":
        rows(episodes.environment.taskset, given.count)
    else:
        print(f"renderer: {renderer.name}", file=sys.stderr, flush=True)
        asyncio.run(served(episodes, given.host, given.port))


if __name__ == "__main__":
    main()
