"""A server that speaks as a gateway does, in OpenAI's and Anthropic's formats, and says what a script tells it to.

It knows no model and no tokens. Each key has a script of its own; what is asked under it is counted.
"""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from shared.runtime.errors import DeadlineExceeded

MODEL = "model-under-check"
CALL_ID = "call_1"
START_SECONDS = 10.0


@dataclass(frozen=True)
class Said:
    """One answer. ``text``; ``tool``: the name and the arguments' text of a call; ``status``: a refusal instead. ``seconds``: it takes."""

    text: str = ""
    tool: tuple[str, str] | None = None
    status: int = 200
    seconds: float = 0.0


@dataclass
class Script:
    """What is said under a key: each answer in turn, then the last one again. ``asked``: how often; ``unread``: paths that are none."""

    answers: Sequence[Said]
    asked: int = 0
    unread: str = ""

    def next(self) -> Said:
        """Returns the answer of this request."""
        self.asked += 1
        return self.answers[min(self.asked, len(self.answers)) - 1]


class ScriptedModel:
    """The server, in a thread of its own: an agent that blocks must not block it. ``base_url`` as agents get it."""

    def __init__(self) -> None:
        self.base_url, self._scripts = "", dict[str, Script]()
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._serve, name="scripted-model", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(START_SECONDS):
            raise DeadlineExceeded("the server for the check", "this process", START_SECONDS, "given up")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS)

    def script(self, key: str, *answers: Said) -> Script:
        """Returns the script of a key, which is new."""
        self._scripts[key] = script = Script(answers)
        return script

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._started())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _started(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"
        return runner

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
        script = self._scripts.get(key)
        if script is None:
            return web.json_response({"error": {"message": "this key opens no session", "type": "authentication_error"}}, status=401)
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        form = FORMS.get(request.path)
        if form is None or request.method != "POST":
            script.unread = f"{request.method} {request.path}"
            return web.json_response({"error": {"message": f"no {script.unread} here", "type": "not_found_error"}}, status=404)
        asked, said = await request.json(), script.next()
        await asyncio.sleep(said.seconds)
        if said.status != 200:
            error = {"type": "error", "error": {"message": f"a refusal of the check: {said.status}", "type": "check"}}
            return web.json_response(error, status=said.status, headers={"Retry-After": "0"})
        answer = form.answer(said)
        if not asked.get("stream"):
            return web.json_response(answer)
        return web.Response(text="".join(form.events(said, answer)), content_type="text/event-stream")


def _event(data: Mapping[str, Any], *, named: bool = True) -> str:
    return (f"event: {data['type']}\n" if named else "") + f"data: {json.dumps(data)}\n\n"


class _Chat:
    """OpenAI's chat completions."""

    def answer(self, said: Said) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": said.text}
        if said.tool is not None:
            name, arguments = said.tool
            message["tool_calls"] = [{"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if said.tool else "stop", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice], "usage": usage}

    def events(self, said: Said, answer: Mapping[str, Any]) -> Iterator[str]:
        [choice] = answer["choices"]
        delta = {**choice["message"]}
        if "tool_calls" in delta:
            delta["tool_calls"] = [{"index": 0, **call} for call in delta["tool_calls"]]
        head = {**answer, "object": "chat.completion.chunk"}
        yield _event({**head, "usage": None, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}, named=False)
        yield _event({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}, named=False)
        yield "data: [DONE]\n\n"


class _Responses:
    """OpenAI's responses."""

    def answer(self, said: Said) -> dict[str, Any]:
        part = {"type": "output_text", "text": said.text, "annotations": []}
        item: dict[str, Any] = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
        if said.tool is not None:
            name, arguments = said.tool
            item = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": CALL_ID, "name": name, "arguments": arguments}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        settings = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
        head = {"id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": "completed"}
        return {**head, **settings, "output": [item], "usage": {**usage, **details}}

    def events(self, said: Said, answer: Mapping[str, Any]) -> Iterator[str]:
        [item] = answer["output"]
        place = {"output_index": 0, "item_id": item["id"]}
        events: list[dict[str, Any]] = [{"type": "response.created", "response": {**answer, "status": "in_progress", "output": []}}]
        events.append({"type": "response.output_item.added", "output_index": 0, "item": {**item, "status": "in_progress", "content": []}})
        if said.tool is not None:
            events.append({"type": "response.function_call_arguments.done", **place, "name": said.tool[0], "arguments": said.tool[1]})
        else:
            [part] = item["content"]
            text = {**place, "content_index": 0, "logprobs": []}
            events.append({"type": "response.content_part.added", **place, "content_index": 0, "part": {**part, "text": ""}})
            events.append({"type": "response.output_text.delta", **text, "delta": said.text})
            events.append({"type": "response.output_text.done", **text, "text": said.text})
            events.append({"type": "response.content_part.done", **place, "content_index": 0, "part": part})
        events.append({"type": "response.output_item.done", "output_index": 0, "item": item})
        events.append({"type": "response.completed", "response": answer})
        yield from (_event({**event, "sequence_number": number}) for number, event in enumerate(events))


class _Messages:
    """Anthropic's messages."""

    def answer(self, said: Said) -> dict[str, Any]:
        block: dict[str, Any] = {"type": "text", "text": said.text}
        if said.tool is not None:
            block = {"type": "tool_use", "id": CALL_ID, "name": said.tool[0], "input": _object(said.tool[1])}
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": [block]}
        stop = {"stop_reason": "tool_use" if said.tool else "end_turn", "stop_sequence": None}
        return {**head, **stop, "usage": {"input_tokens": 1, "output_tokens": 1}}

    def events(self, said: Said, answer: Mapping[str, Any]) -> Iterator[str]:
        [block] = answer["content"]
        empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": said.text}
        if said.tool is not None:
            empty, delta = {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield _event({"type": "message_start", "message": {**answer, "content": [], "stop_reason": None}})
        yield _event({"type": "content_block_start", "index": 0, "content_block": empty})
        yield _event({"type": "content_block_delta", "index": 0, "delta": delta})
        yield _event({"type": "content_block_stop", "index": 0})
        yield _event(
            {"type": "message_delta", "delta": {"stop_reason": answer["stop_reason"], "stop_sequence": None}, "usage": answer["usage"]}
        )
        yield _event({"type": "message_stop"})


def _object(arguments: str) -> Any:
    """Returns the arguments of a call as an object; Anthropic's format has no other."""
    try:
        read = json.loads(arguments)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


FORMS: dict[str, _Chat | _Responses | _Messages] = {
    "/v1/chat/completions": _Chat(),
    "/v1/responses": _Responses(),
    "/v1/messages": _Messages(),
}
