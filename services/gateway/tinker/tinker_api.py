"""The Tinker SDK's HTTP API: keys, commands into the log, futures out of it.

Every request that trains, saves or samples becomes a command before it is answered: its future resolves whatever dies meanwhile. A request
that is sent again finds its command, and is not carried out twice.
"""

import json
import time
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from services.gateway.routes import bounded_body
from services.gateway.tinker import protobuf, requests
from services.gateway.tinker.command_book import CommandBook
from services.gateway.tinker.requests import PREFIX, Asked, ServedModel, WrongRequest, digest, read_json, wrong
from services.gateway.tinker.sampler import Sampler
from services.gateway.tinker.tenants import Tenant, owner
from services.gateway.wire.request import TurnRefused
from shared.bus.bus_errors import StreamFull
from shared.bus.command_log import CommandLog
from shared.runtime.errors import BadMessage, MyxoError, PayloadMissing
from shared.schema import codec
from shared.schema.client_commands import Command, CommandOutcome, Verb
from shared.schema.digests import reference
from shared.service.service_base import Service
from shared.store.payload_store import StoreFull

API = "/api/v1"
POLL_SECONDS = 20.0  # the longest time that a future's request waits; the SDK's own limit is 45
READ_SECONDS = 3600  # the time that a result stays after it was read first
PROTOBUF = "application/x-protobuf"
UNEMBEDDING = "train_unembed is accepted and trains nothing: this server has no adapter on the output layer"
FIXED: dict[str, dict[str, str]] = {
    "client/dynamic_config": {},
    "cancel_future": {},
    "telemetry": {"status": "accepted"},
    "session_heartbeat": {"type": "session_heartbeat"},
}
JSON_VERBS: dict[Verb, type[Any]] = {
    "load_weights": requests.LoadWeights,
    "optim_step": requests.OptimStep,
    "save_weights": requests.SaveWeights,
    "save_weights_for_sampler": requests.SaveWeights,
}


class ApiError(MyxoError):
    """An answer with an error's status."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


class TinkerApi:
    """The API. ``served``: what this server serves. ``tenants``: by name."""

    def __init__(
        self, service: Service, log: CommandLog, book: CommandBook, sampler: Sampler, served: ServedModel, tenants: dict[str, Tenant]
    ) -> None:
        self._service, self._log, self._book, self._sampler, self._served = service, log, book, sampler, served
        self._tenants = tenants

    def app(self) -> FastAPI:
        """Returns the application."""
        app = FastAPI(openapi_url=None)
        posts: dict[str, Callable[[str, Request], Awaitable[Response]]] = {
            "client/config": self._client_config,
            "create_session": self._create_session,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "create_model": self._create_model,
            "forward_backward": self._forward_backward,
            **{verb: self._train(verb) for verb in JSON_VERBS},
            **{path: self._fixed(answer) for path, answer in FIXED.items()},
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "sessions/{session}/finish": self._finish,
        }
        gets = {"get_server_capabilities": self._capabilities, "samplers/{sampler}": self._get_sampler}
        for path, handler in posts.items():
            app.post(f"{API}/{path}")(self._guarded(handler))
        for path, handler in gets.items():
            app.get(f"{API}/{path}")(self._guarded(handler))
        app.get(f"{API}/healthz")(self._health)
        app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])(self._unknown)
        return app

    def _guarded(self, handler: Callable[[str, Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Returns a handler that gets the tenant of the request's key, and whose errors are answers."""

        async def answer(request: Request) -> Response:
            try:
                if (tenant := owner(self._tenants, request.headers.get("x-api-key", ""))) is None:
                    raise ApiError(HTTPStatus.UNAUTHORIZED, "X-API-Key: no tenant has this key")
                return await handler(tenant, request)
            except ApiError as error:
                return _failed(error.status, str(error))
            except (WrongRequest, BadMessage) as error:
                return _failed(HTTPStatus.BAD_REQUEST, str(error))
            except TurnRefused as error:
                return _failed(error.status, str(error))
            except (StreamFull, StoreFull) as error:  # the SDK waits and asks again
                return _failed(HTTPStatus.TOO_MANY_REQUESTS, str(error))
            except MyxoError as error:
                structlog.get_logger().error("request_failed", path=request.url.path, error=str(error))
                return _failed(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
            except Exception:  # a 500 would be sent again at once, for ever
                structlog.get_logger().exception("request_failed", path=request.url.path)
                return _failed(HTTPStatus.UNPROCESSABLE_ENTITY, "this server failed at the request; its log has the reason")

        return answer

    async def _unknown(self, request: Request) -> Response:
        return _failed(HTTPStatus.NOT_FOUND, f"{request.method} {request.url.path}: this server does not have it")

    async def _body(self, request: Request) -> bytes:
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Encoding: {encoding}; expected none")
        return await bounded_body(request, self._service.config.tinker.tinker_body_bytes)

    async def _json(self, request: Request) -> dict[str, Any]:
        try:
            found = json.loads(await self._body(request))
        except (ValueError, RecursionError) as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"the body: expected JSON ({error})") from error
        if not isinstance(found, dict):
            raise ApiError(HTTPStatus.BAD_REQUEST, f"the body: a {type(found).__name__}; expected a JSON object")
        return found

    # --- without commands

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok"})

    def _fixed(self, answer: dict[str, str]) -> Callable[[str, Request], Awaitable[Response]]:
        async def handler(tenant: str, request: Request) -> Response:
            return JSONResponse(answer)

        return handler

    async def _client_config(self, tenant: str, request: Request) -> Response:
        section = self._service.config.tinker
        return JSONResponse(
            {
                "pjwt_auth_enabled": False,
                "parallel_fwdbwd_chunks": True,
                "proto_compress_fwdbwd": False,
                "fwdbwd_max_chunk_bytes_count": min(5_000_000, section.tinker_body_bytes * 3 // 4),
                "sample_max_concurrent_requests": 4 * section.tinker_samples,
                "sample_enable_stuck_detection": False,
                "use_pyqwest_transport": False,
            }
        )

    async def _create_session(self, tenant: str, request: Request) -> Response:
        warning = UNEMBEDDING if self._served.rank is not None else None
        session = f"{tenant}-{uuid.uuid4().hex[:16]}"
        return JSONResponse({"type": "create_session", "session_id": session, "info_message": warning})

    async def _capabilities(self, tenant: str, request: Request) -> Response:
        served = self._served
        names = {"max_context_length": served.context, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": name, **names} for name in served.names[:1]]})

    async def _get_info(self, tenant: str, request: Request) -> Response:
        model = _owned(tenant, str((await self._json(request)).get("model_id")), "model_id")
        if model not in self._book.models:
            raise ApiError(HTTPStatus.NOT_FOUND, f"model_id: {model}: there is no such model")
        rank = self._served.rank and self._book.described(model).get("rank", self._served.rank)
        name = self._served.names[0]
        data = {"arch": "", "model_name": name, "tokenizer_id": self._served.names[-1]}
        return JSONResponse(
            {"type": "get_info", "model_data": data, "model_id": model, "is_lora": rank is not None, "lora_rank": rank, "model_name": name}
        )

    async def _weights_info(self, tenant: str, request: Request) -> Response:
        given = await self._json(request)
        path = str(given.get("tinker_path", given.get("path")))
        if path not in self._book.sizes or not path.removeprefix(PREFIX).startswith(f"{tenant}-"):
            raise ApiError(HTTPStatus.NOT_FOUND, f"path: {path}: there are no such weights")
        rank = self._served.rank
        trained = {"train_unembed": False, "train_mlp": True, "train_attn": True} if rank is not None else {}
        return JSONResponse({"base_model": self._served.names[0], "is_lora": rank is not None, "lora_rank": rank, **trained})

    async def _get_sampler(self, tenant: str, request: Request) -> Response:
        sampler = _owned(tenant, request.path_params["sampler"], "sampler")
        if sampler not in self._book.samplers:
            raise ApiError(HTTPStatus.NOT_FOUND, f"sampler: {sampler}: there is no such sampling session")
        return JSONResponse({"sampler_id": sampler, "base_model": self._served.names[0], "model_path": self._book.samplers[sampler]})

    # --- commands

    async def _create_model(self, tenant: str, request: Request) -> Response:
        body = await self._json(request)
        client = _numbered(tenant, body, "session_id", "model_seq_id", "train")
        return await self._submit(
            tenant, client, 0, "create_model", body, lambda: read_json(requests.CreateModel, body).asked(self._served, client)
        )

    def _train(self, verb: Verb) -> Callable[[str, Request], Awaitable[Response]]:
        async def answer(tenant: str, request: Request) -> Response:
            body = await self._json(request)
            if verb == "load_weights" and body.get("session_id") is not None:
                client, number = _numbered(tenant, body, "session_id", "model_seq_id", "train"), 0
            else:
                client, number = _owned(tenant, str(body.get("model_id")), "model_id"), _number(body, "seq_id", 1)
            return await self._submit(tenant, client, number, verb, body, lambda: self._asked(verb, body, client))

        return answer

    def _asked(self, verb: Verb, body: dict[str, Any], client: str) -> Asked:
        found = read_json(JSON_VERBS[verb], body)
        if not verb.startswith("save_weights"):
            asked: Asked = found.asked(self._served, client)
            if verb == "load_weights" and not self._book.is_taken(asked.arguments["path"]):
                raise WrongRequest(f"path: {asked.arguments['path']}: there are no such weights")
            return asked
        asked = found.asked(self._served, client, "weights" if verb == "save_weights" else "sampler_weights")
        if self._book.is_taken(path := asked.arguments["path"]) and not (found.overwrite and verb == "save_weights"):
            raise wrong("path", path, "a name that is not taken" + (", or overwrite" if verb == "save_weights" else ""))
        if found.sampling_session_seq_id is not None:
            asked.arguments["sampler"] = f"{client.partition(':')[0]}:sample:{found.sampling_session_seq_id}"
        return asked

    async def _forward_backward(self, tenant: str, request: Request) -> Response:
        if (kind := request.headers.get("content-type", "").partition(";")[0]) != PROTOBUF:
            raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type: {kind}; expected {PROTOBUF}, as the SDK from 0.38 sends")
        message = protobuf.read(await self._body(request), protobuf.FORWARD_BACKWARD)
        client, number = _owned(tenant, message.get("model_id", ""), "model_id"), _number(message, "seq_id", 1)
        verb: Verb = "forward" if message.get("forward_only") else "forward_backward"
        return await self._submit(tenant, client, number, verb, None, lambda: requests.forward_backward(message, self._served))

    async def _create_sampling_session(self, tenant: str, request: Request) -> Response:
        body = await self._json(request)
        client = _numbered(tenant, body, "session_id", "sampling_session_seq_id", "sample")
        asked = read_json(requests.CreateSamplingSession, body).asked(self._served, client)
        if asked.arguments["path"] is not None and asked.arguments["path"] not in self._book.sizes:
            raise ApiError(HTTPStatus.NOT_FOUND, f"model_path: {asked.arguments['path']}: there are no such weights")
        await self._submit(tenant, client, 0, "create_sampling_session", body, lambda: asked)
        self._book.see(await self._log.append(CommandOutcome(client=client, number=0, at=time.time())))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": client})

    async def _sample(self, tenant: str, request: Request) -> Response:
        body = await self._json(request)
        client, number = _owned(tenant, str(body.get("sampling_session_id")), "sampling_session_id"), _number(body, "seq_id", 0) + 1
        if client not in self._book.samplers:
            raise ApiError(HTTPStatus.NOT_FOUND, f"sampling_session_id: {client}: there is no such sampling session")
        answer = await self._submit(
            tenant, client, number, "sample", body, lambda: read_json(requests.SampleBody, body).asked(self._served, client)
        )
        self._sampler.start(self._book.commands[client, number])
        return answer

    async def _finish(self, tenant: str, request: Request) -> Response:
        """Ends a session: its models are unloaded, what it saved stays."""
        session = _owned(tenant, request.path_params["session"], "session")
        for model in [model for model in self._book.models if model.startswith(f"{session}:")]:
            await self._submit(tenant, model, self._book.next_number(model), "unload_model", {}, Asked)
        return JSONResponse({"type": "finish_session"})

    async def _submit(
        self, tenant: str, client: str, number: int, verb: Verb, body: dict[str, Any] | None, build: Callable[[], Asked]
    ) -> Response:
        """Answers with the future of a command, which is in the log then: this one, or the same request's from before."""
        refused, asked = "", Asked()
        known = self._book.commands.get((client, number))
        try:
            if known is None or known.refused:
                asked = build()
                self._check_quotas(tenant, client, verb, asked)
            elif body is None:
                asked = build()
        except WrongRequest as error:
            refused = str(error)
        arguments, blob = asked.encoded()
        told = json.dumps(body, sort_keys=True).encode() if body is not None else arguments.encode() + (blob or refused.encode())
        command = Command(client=client, number=number, at=time.time(), verb=verb, digest=digest(verb, told), refused=refused)
        if known is None:
            if not refused:
                command = command.model_copy(update={"arguments": arguments, "tokens": asked.tokens})
                if blob is not None:
                    key = self._service.subjects.command_key(client, number, "request")
                    await self._service.store.write({key: blob})
                    command = command.model_copy(update={"payload": reference(self._service.run, {key: blob})})
            known = await self._log.append(command)
            self._book.see(known)
        if known.digest != command.digest:
            message = f"{client}: its request number {number} is there already, a {known.verb} with another content"
            raise ApiError(HTTPStatus.UNPROCESSABLE_ENTITY, message)
        self._service.metrics.add("commands_accepted")
        future: dict[str, Any] = {"request_id": f"{client}/{number}", "model_id": client if ":train:" in client else None}
        if verb == "sample":
            count = json.loads(known.arguments).get("n", 1)
            future["sample_sequence_ids"] = [f"{client}/{number}/{index}" for index in range(count)]
        return JSONResponse(future)

    def _check_quotas(self, tenant: str, client: str, verb: Verb, asked: Asked) -> None:
        quotas, book = self._tenants[tenant], self._book
        if quotas.tokens is not None and (used := book.used[tenant]) + asked.tokens > quotas.tokens:
            raise WrongRequest(f"tokens: {asked.tokens} more than the {used} that {tenant} has used; its quota is {quotas.tokens}")
        makes = verb == "create_model" or (verb == "load_weights" and client not in book.models)
        if makes and quotas.models is not None and len(held := book.held(tenant)) >= quotas.models:
            raise WrongRequest(f"models: {len(held)} of {tenant} are there; the quota is {quotas.models}; close a session to unload some")
        if verb.startswith("save_weights") and quotas.bytes is not None and (stored := book.stored(tenant)) >= quotas.bytes:
            raise WrongRequest(f"bytes: {stored} of saved weights of {tenant} are there; its quota is {quotas.bytes}")

    # --- futures

    async def _retrieve(self, tenant: str, request: Request) -> Response:
        given = str((await self._json(request)).get("request_id"))
        client, _, number = given.rpartition("/")
        key = _owned(tenant, client, "request_id"), int(number) if number.isdecimal() else -1
        if key not in self._book.commands:
            raise ApiError(HTTPStatus.NOT_FOUND, f"request_id: {given}: there is no such request")
        if (outcome := await self._book.outcome(key, POLL_SECONDS)) is None:
            waiting = {"type": "try_again", "request_id": given, "queue_state": "active"}
            return JSONResponse(waiting, HTTPStatus.REQUEST_TIMEOUT)
        if outcome.error:
            return JSONResponse({"error": outcome.error, "category": outcome.category})
        command = self._book.commands[key]
        if command.verb in ("forward", "forward_backward", "sample"):
            return await self._result(command, outcome)
        return JSONResponse(self._plain_result(command, outcome))

    async def _result(self, command: Command, outcome: CommandOutcome) -> Response:
        assert outcome.payload is not None
        try:
            [blob] = await self._service.store.read(outcome.payload)
        except PayloadMissing:
            return JSONResponse({"error": f"the result was removed {READ_SECONDS} s after it was read", "category": "server"})
        await self._service.store.commands("the expiry of a result", [("EXPIRE", outcome.payload.keys[0], READ_SECONDS)])
        found = codec.unpack(blob)
        if command.verb == "sample":
            sequences = [(one["stopped"], one["tokens"], one["log_probs"]) for one in found["sequences"]]
            return Response(protobuf.sample_response(sequences, found["prompt"], found["cached"]), media_type=PROTOBUF)
        return Response(protobuf.forward_backward_output(found["log_probs"], found["metrics"]), media_type=PROTOBUF)

    def _plain_result(self, command: Command, outcome: CommandOutcome) -> dict[str, Any]:
        arguments = json.loads(command.arguments)
        if command.verb == "optim_step":
            return dict(json.loads(outcome.result))
        result = {"type": command.verb, "model_id": command.client, "path": arguments.get("path")}
        if sampler := arguments.get("sampler"):
            result |= {"sampling_session_id": sampler}
        return result


def _failed(status: int, message: str) -> Response:
    return JSONResponse({"error": message, "detail": message, "category": "user" if status < 500 else "server"}, status)


def _owned(tenant: str, client: str, name: str) -> str:
    """Returns a client's id. Raises ApiError where it is another tenant's, or none: as one that is not there."""
    if not requests.CLIENT.match(client) or client.partition("-")[0] != tenant:
        raise ApiError(HTTPStatus.NOT_FOUND, f"{name}: {client[:100]}: there is no such thing")
    return client


def _number(body: dict[str, Any], name: str, least: int) -> int:
    number = body.get(name)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number < 1 << 61:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"{name}: {number!r}; expected a number from {least} on")
    return number


def _numbered(tenant: str, body: dict[str, Any], session: str, name: str, kind: str) -> str:
    number = _number(body, name, 0)
    if number >= 10**9:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"{name}: {number}; expected less than {10**9}")
    return f"{_owned(tenant, str(body.get(session)), session).partition(':')[0]}:{kind}:{number}"
