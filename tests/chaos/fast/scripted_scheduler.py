"""The scheduler of a scripted engine: it draws what its weights tell, and holds the real receiver of weights.

Each token says the version of the weights that have drawn it (`scripted_weights`), whatever version the engine was told that it serves. So
a label that is wrong shows, and weights of which some parameters are newer than others do, too. It answers SGLang's HTTP requests, as the
rollout service makes them, on a socket for the engine's own server (`scripted_engine`).
"""

import asyncio
import concurrent.futures
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from services.rollout.engine.private_endpoints import DIRECTORY_VARIABLE
from services.rollout.engine.receiver.command_session import CommandSession
from services.rollout.engine.receiver.receiver import Receiver
from tests.chaos.fast.scripted_engine import SCHEDULER_SOCKET
from tests.chaos.fast.scripted_weights import MIXED_TOKEN, token_of, versions_in

LOG_PROB = -1.0
TOKEN_SECONDS = float(os.environ.get("MYXO_CHAOS_TOKEN_SECONDS", "0.01"))
CONTEXT = 1024
RELEASE = "0.5.21"


class ScriptedWeights(torch.nn.Module):
    """A checkpoint's tensors, each under its own name."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        held = load_file(model / "model.safetensors")
        self.names = sorted(held)
        self.held = torch.nn.ParameterList([torch.nn.Parameter(held[name], requires_grad=False) for name in self.names])

    def load_weights(self, tensors: Any) -> None:
        by_name = dict(zip(self.names, self.held, strict=True))
        for name, tensor in tensors:
            by_name[name].data.copy_(tensor)


@dataclass(eq=False)
class _Request:
    """A sample under way. ``length``: of its sequence at its end. ``spans``: [start, end, label] of its output."""

    rid: str
    position: int
    room: int
    top: int = 0
    output: list[int] = field(default_factory=list)
    spans: list[list[int]] = field(default_factory=list)
    finish: str = ""
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, finish: str) -> None:
        self.finish = self.finish or finish
        self.ended.set()


class ScriptedScheduler:
    """The scheduler and its answers. ``directory``: the engine's private one, where both of its sockets lie."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._directory = model, directory
        self._weights = ScriptedWeights(model)
        self._versions = versions_in(self._weights.held)
        self._label, self._paused, self._drawn = "0", "", 0
        self._session: CommandSession | None = None
        self._running: dict[str, _Request] = {}
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "scheduler")  # the one that owns the weights
        self._step = asyncio.Lock()

    def application(self) -> web.Application:
        """Returns the HTTP side."""
        app = web.Application(client_max_size=1 << 30)
        answers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._resume,
            "/flush_cache": self._nothing,
            "/begin_weight_update": self._nothing,
            "/end_weight_update": self._nothing,
            "/freeze_gc": self._nothing,
            "/update_weights_from_tensor": self._run_command,
            "/update_weights_from_disk": self._load,
            "/update_weight_version": self._name_version,
        }
        for path, answer in answers.items():
            app.router.add_post(path, _handler(answer))
        model_info = lambda _: {"model_path": str(self._model), "weight_version": self._label}  # noqa: E731
        described: dict[str, Callable[[dict[str, Any]], Any]] = {
            "/server_info": lambda _: {
                "version": RELEASE,
                "max_total_num_tokens": 1 << 16,
                "page_size": 1,
                "disable_overlap_schedule": True,
                "tp_size": 1,
            },
            "/model_info": model_info,
            "/health_generate": self._probe,
            "/v1/models": lambda _: {"data": [{"max_model_len": CONTEXT}]},
        }
        for path, answer in described.items():
            app.router.add_get(path, _handler(answer))
        app.router.add_get("/metrics", self._metrics)
        return app

    async def draw(self) -> None:
        """Draws a token of every running request in each step, as a scheduler does. Runs until cancelled."""
        while True:
            await asyncio.sleep(TOKEN_SECONDS)
            if self._running and not self._paused:
                async with self._step:
                    for request in list(self._running.values()):
                        self._draw(request)

    def _draw(self, request: _Request) -> None:
        position = request.position + len(request.output)
        token = token_of(*self._versions, position) if len(self._versions) == 1 else MIXED_TOKEN
        label = int(self._label)
        if request.spans and request.spans[-1][2] == label:
            request.spans[-1][1] += 1
        else:
            request.spans.append([len(request.output), len(request.output) + 1, label])
        request.output.append(token)
        self._drawn += 1
        if len(request.output) >= request.room:
            del self._running[request.rid]
            request.end("length")

    # --- requests

    async def _generate(self, body: dict[str, Any]) -> Any:
        single = not isinstance(body["input_ids"][0], list)
        inputs = [body["input_ids"]] if single else body["input_ids"]
        sampling = [body["sampling_params"]] if single else body["sampling_params"]
        rids = body.get("rid") or [f"probe-{time.monotonic_ns()}"]
        requests = [
            _Request(rid, len(tokens), given["max_new_tokens"], body.get("top_logprobs_num", 0))
            for rid, tokens, given in zip([rids] if isinstance(rids, str) else rids, inputs, sampling, strict=True)
        ]
        for request in requests:
            self._running[request.rid] = request
        for request in requests:
            await request.ended.wait()
        answers = [self._answer(request) for request in requests]
        return answers[0] if single else answers

    async def _probe(self, _: dict[str, Any]) -> dict[str, Any]:
        await self._generate({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
        return {}

    def _answer(self, request: _Request) -> dict[str, Any]:
        meta = {
            "id": request.rid,
            "finish_reason": {"type": request.finish},
            "output_token_logprobs": [[LOG_PROB, token, None] for token in request.output],
            "weight_versions": [{"start": start, "end": end, "version": str(version)} for start, end, version in request.spans],
            "weight_version": self._label,
            "cached_tokens": 0,
        }
        if request.top:
            meta["output_top_logprobs"] = [
                [[LOG_PROB - rank, token + rank, None] for rank in range(request.top)] for token in request.output
            ]
        return {"output_ids": request.output, "meta_info": meta}

    async def _abort(self, body: dict[str, Any]) -> None:
        prefix = "" if body.get("abort_all") else str(body.get("rid", ""))
        for request in [request for rid, request in self._running.items() if rid.startswith(prefix)]:
            del self._running[request.rid]
            request.end("abort")

    async def _pause(self, body: dict[str, Any]) -> None:
        self._paused = str(body["mode"])
        async with self._step:
            if self._paused == "abort":
                await self._abort({"abort_all": True})

    async def _resume(self, _: dict[str, Any]) -> None:
        self._paused = ""

    async def _nothing(self, _: dict[str, Any]) -> None:
        pass

    async def _name_version(self, body: dict[str, Any]) -> None:
        self._label = str(body["new_version"])

    # --- weights

    async def _run_command(self, _: dict[str, Any]) -> dict[str, Any]:
        """Runs the receiver's next command on the scheduler's thread; the first call opens its socket."""
        await self._on_scheduler(self._work)
        return {"success": True}

    def _work(self) -> None:
        if self._session is None:
            self._session = CommandSession(self._directory, Receiver(self._weights, 0, "cpu", str(self._model)))
            self._session.open()
        else:
            self._session.work()

    async def _load(self, body: dict[str, Any]) -> dict[str, Any]:
        paths = sorted(Path(body["model_path"]).glob("*.safetensors"))
        await self._on_scheduler(lambda: [self._weights.load_weights(load_file(path).items()) for path in paths])
        self._label = str(body["weight_version"])
        return {"success": True}

    async def _on_scheduler(self, work: Callable[[], Any]) -> None:
        async with self._step:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._thread, work)
            self._versions = await loop.run_in_executor(self._thread, lambda: versions_in(self._weights.held))

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=f'sglang:realtime_tokens_total{{mode="decode"}} {self._drawn}\n')


def _handler(answer: Callable[[dict[str, Any]], Any]) -> Callable[[web.Request], Any]:
    async def handle(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        found = answer(body)
        return web.json_response(await found if asyncio.iscoroutine(found) else found)

    return handle


async def serve(model: Path, directory: Path) -> None:
    """Serves until it is killed."""
    scheduler = ScriptedScheduler(model, directory)
    runner = web.AppRunner(scheduler.application(), access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, str(directory / SCHEDULER_SOCKET)).start()
    await scheduler.draw()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve(Path(sys.argv[1]), Path(os.environ[DIRECTORY_VARIABLE])))
