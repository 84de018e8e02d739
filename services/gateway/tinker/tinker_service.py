"""The training endpoint as a service: the Tinker SDK's HTTP API (keys, commands, futures), and samples, each made once.

Every request that trains, saves or samples becomes a command before it is answered: its future resolves whatever dies meanwhile. A request
that is sent again finds its command, and is not carried out twice.
"""

import asyncio
import hashlib
import itertools
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from google.protobuf.message import DecodeError

from services.gateway.replicas import GenerationClient, ReplicaFailed, Replicas
from services.gateway.routes import bounded_body
from services.gateway.tinker import requests
from services.gateway.tinker.command_book import PREFIX, CommandBook, Tenant, WrongRequest, owner, read_tenants, wrong
from services.gateway.tinker.requests import FORMS, Asked, ServedModel, key_of, not_there, owned, read_json, seed_of
from shared.bus.bus_errors import StreamFull
from shared.bus.command_log import KEPT_SECONDS, CommandLog
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.formats.request import TurnRefused
from shared.model.families import read_architecture
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from shared.runtime.errors import MyxoError, PayloadChanged, PayloadMissing
from shared.runtime.tasks import describe, gathered
from shared.runtime.telemetry import declare_metrics
from shared.schema import codec
from shared.schema.messages import MOST_ARGUMENTS, Command, CommandOutcome, Sampling, Verb, weights_directory
from shared.service.service_base import Service
from shared.sessions.session import TurnGeneration, TurnRequest
from shared.sessions.session_store import SessionStore
from shared.store.payload_store import StoreFull

API = "/api/v1"
COMING_SECONDS = 0.02  # between two looks at whether a command has been written
POLL_SECONDS = 20.0  # the longest time that a future's request waits; the SDK's own limit is 45
MOST_REASON = 1000  # characters of why a request is refused: it may name what a client has sent
READ_SECONDS = 3600  # the time that a result stays after it was read first
PROTOBUF = "application/x-protobuf"
UNEMBEDDING = "train_unembed is accepted and trains nothing: this server has no adapter on the output layer"
FIXED: dict[str, dict[str, str]] = {
    "client/dynamic_config": {},
    "telemetry": {"status": "accepted"},
    "session_heartbeat": {"type": "session_heartbeat"},
}
Handler = Callable[[str, Request], Awaitable[Response]]


@dataclass(frozen=True)
class TinkerApi:
    """The API. ``sample``: begins a sampling command. ``served``: what this server serves. ``tenants``: by name."""

    _service: Service
    _log: CommandLog
    _book: CommandBook
    _sample: Callable[[Command], None]
    _served: ServedModel
    _tenants: dict[str, Tenant]

    def app(self) -> FastAPI:
        """Returns the application."""
        app = FastAPI(openapi_url=None)
        posts: dict[str, Handler] = {
            "client/config": self._client_config,
            "create_session": self._create_session,
            "get_info": self._get_info,
            "weights_info": self._weights_info,
            "forward_backward": self._forward_backward,
            "retrieve_future": self._retrieve,
            "sessions/{session}/finish": self._finish,
            **{"asample" if verb == "sample" else verb: self._command(verb) for verb in FORMS},
            **{path: self._fixed(answer) for path, answer in FIXED.items()},
        }
        for path, handler in posts.items():
            app.post(f"{API}/{path}")(self._guarded(handler))
        app.get(f"{API}/get_server_capabilities")(self._guarded(self._capabilities))
        app.get(f"{API}/samplers/{{sampler}}")(self._guarded(self._get_sampler))
        app.get(f"{API}/healthz")(self._health)
        app.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])(self._unknown)
        return app

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """Returns a handler that gets the tenant of the request's key, and whose errors are answers."""

        async def answer(request: Request) -> Response:
            try:
                if (tenant := owner(self._tenants, request.headers.get("x-api-key", ""))) is None:
                    return _failed(HTTPStatus.UNAUTHORIZED, "X-API-Key: no tenant has this key")
                return await handler(tenant, request)
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
            raise TurnRefused(400, f"Content-Encoding: {encoding}; expected none")
        return await bounded_body(request, self._service.config.tinker.tinker_body_bytes)

    async def _json(self, request: Request) -> dict[str, Any]:
        try:
            found = json.loads(await self._body(request))
        except (ValueError, RecursionError) as error:
            raise WrongRequest(f"the body: expected JSON ({error})") from error
        if not isinstance(found, dict):
            raise WrongRequest(f"the body: a {type(found).__name__}; expected a JSON object")
        return found

    # --- without commands

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok"})

    def _fixed(self, answer: dict[str, str]) -> Handler:
        async def handler(tenant: str, request: Request) -> Response:
            return JSONResponse(answer)

        return handler

    async def _client_config(self, tenant: str, request: Request) -> Response:
        section = self._service.config.tinker
        off = ("pjwt_auth_enabled", "proto_compress_fwdbwd", "sample_enable_stuck_detection", "use_pyqwest_transport")
        chunk = min(5_000_000, section.tinker_body_bytes * 3 // 4)
        limits = {"fwdbwd_max_chunk_bytes_count": chunk, "sample_max_concurrent_requests": 4 * section.tinker_samples}
        return JSONResponse({"parallel_fwdbwd_chunks": True, **dict.fromkeys(off, False), **limits})

    async def _create_session(self, tenant: str, request: Request) -> Response:
        warning = UNEMBEDDING if self._served.rank is not None else None
        session = f"{tenant}-{uuid.uuid4().hex[:16]}"
        return JSONResponse({"type": "create_session", "session_id": session, "info_message": warning})

    async def _capabilities(self, tenant: str, request: Request) -> Response:
        model = {"model_name": self._served.names[0], "max_context_length": self._served.context, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [model]})

    async def _get_info(self, tenant: str, request: Request) -> Response:
        model = owned(tenant, await self._json(request), "model_id", "train")
        if model not in self._book.models:
            raise not_there("model_id", model)
        rank, name = self._served.rank and self._book.rank_of(model, self._served.rank), self._served.names[0]
        data = {"arch": "", "model_name": name, "tokenizer_id": self._served.names[-1]}
        adapters = {"is_lora": rank is not None, "lora_rank": rank}
        return JSONResponse({"type": "get_info", "model_data": data, "model_id": model, "model_name": name, **adapters})

    async def _weights_info(self, tenant: str, request: Request) -> Response:
        given = await self._json(request)
        path = str(given.get("tinker_path", given.get("path")))
        if not path.startswith(f"{PREFIX}{tenant}-") or not self._book.is_there(path):
            raise not_there("path", path)
        rank = self._served.rank and self._book.rank_of(path.removeprefix(PREFIX).split("/")[0], self._served.rank)
        trained = {"train_unembed": False, "train_mlp": True, "train_attn": True} if rank is not None else {}
        return JSONResponse({"base_model": self._served.names[0], "is_lora": rank is not None, "lora_rank": rank, **trained})

    async def _get_sampler(self, tenant: str, request: Request) -> Response:
        sampler = owned(tenant, request.path_params, "sampler", "sample")
        if sampler not in self._book.samplers:
            raise not_there("sampler", sampler)
        return JSONResponse({"sampler_id": sampler, "base_model": self._served.names[0], "model_path": self._book.samplers[sampler]})

    # --- commands

    def _command(self, verb: Verb) -> Handler:
        async def answer(tenant: str, request: Request) -> Response:
            body = await self._json(request)
            client, number = key_of(tenant, verb, body, self._book)
            return await self._submit(tenant, client, number, verb, body, lambda: read_json(verb, body, self._served, self._book, client))

        return answer

    async def _forward_backward(self, tenant: str, request: Request) -> Response:
        if (kind := request.headers.get("content-type", "").partition(";")[0]) != PROTOBUF:
            raise TurnRefused(400, f"Content-Type: {kind}; expected {PROTOBUF}, as the SDK from 0.38 sends")
        body = await self._body(request)
        try:
            message = requests.MESSAGES["ForwardBackwardRequest"].FromString(body)
        except DecodeError as error:
            raise WrongRequest(f"the body: expected a ForwardBackwardRequest ({error})") from None
        verb: Verb = "forward" if message.forward_only else "forward_backward"
        client, number = key_of(tenant, verb, {"model_id": message.model_id, "seq_id": message.seq_id}, self._book)
        return await self._submit(tenant, client, number, verb, body, lambda: requests.forward_backward(message, self._served))

    async def _finish(self, tenant: str, request: Request) -> Response:
        """Ends a session: its models are unloaded, what it saved stays. What waits for a command that never came is answered then."""
        session = owned(tenant, request.path_params, "session")
        for model in [model for model, one in self._book.models.items() if model.startswith(f"{session}:") and one.verb != "unload_model"]:
            await self._submit(tenant, model, self._book.missing_number(model), "unload_model", {}, Asked)
        return JSONResponse({"type": "finish_session"})

    async def _submit(
        self, tenant: str, client: str, number: int, verb: Verb, body: dict[str, Any] | bytes, build: Callable[[], Asked]
    ) -> Response:
        """Answers with the future of a command, which is in the log then: this one, or the same request's from before."""
        # the SDK numbers a sampler anew each time that it sends a request to save for it
        same = {name: value for name, value in body.items() if name != "sampling_session_seq_id"} if isinstance(body, dict) else {}
        content = body if isinstance(body, bytes) else json.dumps(same, sort_keys=True).encode()
        digest = hashlib.blake2b(verb.encode() + b"\0" + content, digest_size=16).hexdigest()
        while (client, number) in self._book.coming:  # it was sent again while it is written, and counts once
            await asyncio.sleep(COMING_SECONDS)
        if (known := self._book.commands.get((client, number))) is None:
            known = await self._append(tenant, Command(client=client, number=number, at=time.time(), verb=verb, digest=digest), build)
        if known.digest != digest:
            raise TurnRefused(422, f"{client}: its request number {number} is there already, a {known.verb} with another content")
        self._service.metrics.add("commands_accepted")
        if verb == "create_sampling_session":  # is carried out by its being in the log
            self._book.see(await self._log.append(CommandOutcome(client=client, number=0, at=time.time())))
            return JSONResponse({"type": verb, "sampling_session_id": client})
        future: dict[str, Any] = {"request_id": f"{client}/{number}", "model_id": client if verb != "sample" else None}
        if verb == "sample":
            self._sample(known)
            count = json.loads(known.arguments).get("n", 1)
            future["sample_sequence_ids"] = [f"{client}/{number}/{index}" for index in range(count)]
        return JSONResponse(future)

    async def _append(self, tenant: str, command: Command, build: Callable[[], Asked]) -> Command:
        """Returns what the log has under a new command's key: the command, refused where its request is wrong, or another one that came
        meanwhile."""
        try:
            asked = build()
            quotas, saves = self._tenants[tenant], command.verb.startswith("save_weights")
            arguments = json.dumps(asked.arguments | ({"quota": quotas.bytes} if saves else {}), sort_keys=True)
            command = command.model_copy(update={"arguments": arguments, "tokens": asked.tokens})
            if (length := len(command.arguments)) > MOST_ARGUMENTS:
                raise wrong(command.verb, f"{length} characters beside tokens and tensors (of stop)", f"at most {MOST_ARGUMENTS}")
            self._book.check_quotas(tenant, quotas, command, whole=self._served.rank is None)
        except WrongRequest as error:
            if command.verb == "create_sampling_session" or error.status == 429:
                raise  # the former has no future that could say so, the latter is sent again
            asked, command = Asked(), command.model_copy(update={"refused": str(error)[:MOST_REASON], "arguments": "{}", "tokens": 0})
        self._book.coming[command.key] = command
        try:
            if asked.content is not None:
                blob, name = codec.pack(asked.content), f"request-{command.digest}"
                command = await self._log.with_payload(command, blob, self._service.store, name, seconds=0)
            known = await self._log.append(command)
            self._book.see(known)
        finally:
            self._book.coming.pop(command.key, None)
        if known.digest != command.digest and command.payload is not None:
            await self._service.store.free(command.payload.keys)
        return known

    # --- futures

    async def _retrieve(self, tenant: str, request: Request) -> Response:
        given = str((await self._json(request)).get("request_id"))
        client, _, number = given.rpartition("/")
        owned(tenant, {"request_id": client}, "request_id", "sample" if ":sample:" in client else "train")
        key = client, int(number) if number.isdecimal() and len(number) < 20 else -1
        if (command := self._book.commands.get(key)) is None:
            raise not_there("request_id", given)
        if (outcome := await self._book.outcome(key, POLL_SECONDS)) is None:
            waiting = {"type": "try_again", "request_id": given, "queue_state": "active"}
            if ":train:" in client and (missing := self._book.missing_number(client)) < key[1]:  # the SDK prints it
                reason = f"it waits for request number {missing} of {client}, which never came (a client that fails to send one loses it)"
                waiting |= {"queue_state": "paused_capacity", "queue_state_reason": reason}
            return JSONResponse(waiting, HTTPStatus.REQUEST_TIMEOUT)
        if outcome.error:
            return JSONResponse({"error": outcome.error, "category": outcome.category})
        if outcome.payload is not None:
            return await self._result(command, outcome)
        result, arguments = {"type": command.verb, "model_id": client}, json.loads(command.arguments)
        result |= {"path": arguments.get("path"), "sampling_session_id": arguments.get("sampler")}
        return JSONResponse(json.loads(outcome.result) if command.verb == "optim_step" else result)

    async def _result(self, command: Command, outcome: CommandOutcome) -> Response:
        assert outcome.payload is not None
        try:
            [blob] = await self._service.store.read(outcome.payload)
        except (PayloadMissing, PayloadChanged):
            gone = f"the result is gone: it stays {KEPT_SECONDS} s, and {READ_SECONDS} s from when it is read"
            return JSONResponse({"error": gone, "category": "server"})
        await self._service.store.commands("the expiry of a result", [("EXPIRE", outcome.payload.keys[0], READ_SECONDS)])
        found = codec.unpack(blob)
        if command.verb == "sample":
            return Response(requests.sample_response(found), media_type=PROTOBUF)
        return Response(requests.forward_backward_output(found["log_probs"], found["metrics"]), media_type=PROTOBUF)


def _failed(status: int, message: str) -> Response:
    return JSONResponse({"error": message, "detail": message, "category": "user" if status < 500 else "server"}, status)


declare_metrics("""
    commands_accepted_total | commands | of clients that the training endpoint has answered with a future
    commands_waiting | commands | of them without an outcome yet
    tinker_models | models | of clients that are there
""")
COUNT_SECONDS, STOP_SECONDS = 1.0, 2.0
RETRY_SECONDS = 0.5


def served_by(config: RunConfig) -> ServedModel:
    """Returns what a run serves. Raises ConfigError for a model that cannot be trained."""
    path = config.model.hf_checkpoint
    architecture, device = read_architecture(path), devices.resolve(config.rollout.rollout_device)
    names = (config.tinker.tinker_model_name or str(path), Path(path).name, str(path))
    seeded = device == "cpu" or config.rollout.seeded
    context = int(config.rollout.engine_flags.get("context-length") or architecture.max_positions)
    return ServedModel(names, config.trainer.lora_rank, architecture.vocab_size, context, seeded)


class Sampler:
    """Carries out sampling commands at the replicas."""

    def __init__(self, service: Service, log: CommandLog, book: CommandBook, replicas: Replicas, client: GenerationClient) -> None:
        self._service, self._log, self._book, self._replicas, self._client = service, log, book, replicas, client
        self._slots, self._next = asyncio.Semaphore(service.config.tinker.tinker_samples), itertools.count()
        self._running = dict[tuple[str, int], asyncio.Task[None]]()

    def start(self, command: Command) -> None:
        """Begins a command unless it is under way or done."""
        if command.key not in self._running and command.key not in self._book.outcomes:
            self._running[command.key] = task = self._service.spawn(self._carry_out(command))
            task.add_done_callback(lambda _: self._running.pop(command.key, None))

    async def _carry_out(self, command: Command) -> None:
        started = time.monotonic()
        outcome = CommandOutcome(client=command.client, number=command.number, at=time.time(), error=command.refused, category="user")
        try:
            if not command.refused:
                result, figures = await self._sampled(command)
                outcome = await self._log.with_payload(outcome, result, self._service.store)
                outcome = outcome.model_copy(update={"category": "", "figures": {**figures, "seconds": time.monotonic() - started}})
        except TurnRefused as error:
            outcome = outcome.model_copy(update={"error": str(error)})
        except TimeoutError:
            outcome = outcome.model_copy(update={"error": f"no sample came after {time.monotonic() - started:.0f} s", "category": "server"})
        except Exception as error:  # the same command would end the endpoint again after its restart
            self._service.log.error("sample_failed", client=command.client, number=command.number, exc_info=error)
            outcome = outcome.model_copy(update={"error": describe(error), "category": "server"})
        self._book.see(await self._log.append(outcome.model_copy(update={"at": time.time()})))
        if command.payload is not None:
            await self._service.store.free(command.payload.keys)

    async def _sampled(self, command: Command) -> tuple[bytes, dict[str, float]]:
        self._book.check_sampler(command.client)
        arguments, path, config = json.loads(command.arguments), self._book.samplers[command.client], self._service.config
        assert command.payload is not None
        [blob] = await self._service.store.read(command.payload)
        prompt, sampling = np.array(codec.unpack(blob)["tokens"], np.int32), Sampling(**arguments["sampling"])
        room = (self._replicas.context or len(prompt) + sampling.max_new_tokens) - len(prompt)  # engines may have less than the model
        sampling = sampling.model_copy(update={"max_new_tokens": max(1, min(sampling.max_new_tokens, room))})
        asked = [
            TurnRequest(
                request=f"{command.client}/{command.number}/{index}",
                input_ids=prompt,
                sampling=sampling,
                seed=seed_of(arguments["seed"], command.client, command.number, index),
                seconds=config.rollout.generate_timeout,
                weights="" if path is None else str(weights_directory(config.trained, path)),
                scores_prompt=bool(arguments["prompt_log_probs"]) and index == 0,
            )
            for index in range(arguments["n"])
        ]
        found, last = await gathered(map(self._generated, asked)), arguments["prompt_log_probs"]
        values = np.array(found[0].prompt_log_probs, np.float32)
        values[: len(values) - last] = np.nan
        sequences = [{"stopped": one.finish == "stop", "tokens": one.completion, "log_probs": one.log_probs} for one in found]
        result = {"sequences": sequences, "prompt": values if last else None, "cached": min(one.cached for one in found)}
        return codec.pack(result), {"tokens": float(sum(len(one.completion) for one in found)), "sequences": float(len(found))}

    async def _generated(self, request: TurnRequest) -> TurnGeneration:
        """Returns what a replica samples; another one is asked where it fails, for the run's patience. Raises TurnRefused; TimeoutError."""
        async with self._slots, asyncio.timeout(request.seconds):
            for _ in range(1 + int(self._service.config.rollout.patience / RETRY_SECONDS)):
                if known := self._replicas.known:
                    try:
                        found = await self._client.generate(known[next(self._next) % len(known)].url, request)
                        if found.finish != "abort":
                            return found
                    except ReplicaFailed as error:
                        self._service.log.warning("sample_failed", request=request.request, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
            raise TimeoutError


async def serve(service: Service, address: HttpAddress) -> None:
    """Serves until asked to stop. Raises ConfigError for tenants that cannot be read, or an address that cannot be listened at."""
    config, sessions = service.config, SessionStore(service.store, service.run)
    tenants, served = read_tenants(config.tinker.tinker_tenants), await asyncio.to_thread(served_by, config)
    log, book, caught_up = CommandLog(service.bus, service.run), CommandBook(), asyncio.Event()
    replicas, client = Replicas(service.registry, sessions, config.tinker.tinker_samples), GenerationClient(sessions)
    sampler = Sampler(service, log, book, replicas, client)

    async def follow() -> None:
        async for entry in log.follow():
            if entry is not None:
                book.see(entry)
            elif not caught_up.is_set():
                for command in [one for one in book.commands.values() if one.verb == "sample" and one.key not in book.outcomes]:
                    sampler.start(command)
                caught_up.set()

    async def count() -> None:
        while True:
            service.metrics.set("commands_waiting", len(book.commands) - len(book.outcomes))
            service.metrics.set("tinker_models", len(book.models))
            await asyncio.sleep(COUNT_SECONDS)

    try:
        async with service.background(follow(), count(), replicas.keep()):
            await caught_up.wait()
            api = TinkerApi(service, log, book, sampler.start, served, tenants)
            async with http_endpoints.serving(api.app(), address, grace_s=STOP_SECONDS) as listening:
                service.engine, service.state = f"http://{listening}", "ready"
                await service.announce()
                await service.stopping.wait()
    finally:
        await client.close()
