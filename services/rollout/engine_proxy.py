"""HTTP proxy to this replica's engine, for routers, the agents behind them, and functions of the user's; and the check of samples by its
answers.

It passes on what `ROUTES` lists, and nothing else. The engine itself listens where only this service comes
(`services.rollout.engine.private_endpoints`). Invariant: nothing that untrusted weights generated leaves by this proxy. A fenced replica
answers 503; while weights change, requests wait; and what was being generated when a replica was fenced is not handed out.
"""

import asyncio
import hmac
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import numpy as np
import orjson
from aiohttp import ClientError, ClientResponse, web
from numpy.typing import NDArray

from services.rollout.client_adapters import Adapters
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import Generation, GenerationRequest, with_nuclei
from services.rollout.engine.public_requests import UNBOUNDED, ChatRequest, GenerateRequest, PublicRequest, engine_body, parse_request
from services.rollout.engine.transport import EngineError, InvalidRequest, whole_events
from services.rollout.in_flight import Requests
from services.rollout.prefill_engines import PREFILL_PATH, VERSION_HEADER, rids_of, was_aborted
from services.rollout.served_version import ServedVersion
from shared.data.media import MOST_BYTES, MediaRule, ShownPictures
from shared.data.tokenizer import Tokenizer
from shared.formats.request import TASK_HEADER
from shared.hooks.sample_agreement import Answer, compared
from shared.hooks.slime.http_requests import CALL_HEADER
from shared.runtime.errors import BadMessage, MyxoError
from shared.runtime.telemetry import Metrics, declare_metrics
from shared.schema.ledger import is_evaluation
from shared.schema.messages import Task
from shared.schema.sample import Sample, sampled, token_digest, turns_of
from shared.service.engine_load_balancer import RAW, ROUTES, EndpointServer, RequestDenied, body_of
from shared.service.service_base import Service
from shared.sessions.session import CONTENT_TYPE, GENERATE_PATH, KEY_HEADER, TurnGeneration, TurnRequest

MOST_TOKENS, ANSWER_TOKENS = 1 << 22, 64  # sampled tokens that are remembered, 32 MiB, and as how many an answer counts besides its own
KEYED_BYTES = 2 * MOST_BYTES  # the largest body of who has the gateways' key: a prompt's pictures, for prefill in base64, and its tokens


class EngineAnswers:
    """The newest answers of `/generate`, by the prompt they were given to. ``ends``: ids that end the model's turns. ``whole``: all
    requests were of one prompt's token ids."""

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self.ends, self.whole, self._tokens = ends, True, 0
        self._answers: dict[tuple[int, int], list[Answer]] = {}

    def add(self, request: PublicRequest, body: bytes) -> None:
        """Remembers the answer to a request; nothing of one that comes piece by piece, which has no body."""
        try:
            if not isinstance(request, GenerateRequest) or not request.input_ids or isinstance(request.input_ids[0], list):
                raise ValueError("not the token ids of one prompt")
            prompt, given = np.array(request.input_ids, np.int32), orjson.loads(body)
            answers = [_answer(len(prompt), one) for one in (given if isinstance(given, list) else [given])]
            self._answers.setdefault((len(prompt), token_digest(prompt)), []).extend(answers)
            self._tokens += sum(len(ids) + ANSWER_TOKENS for _, ids, _ in answers)
        except (ValueError, TypeError, LookupError):
            self.whole = False
        while self._tokens > MOST_TOKENS:
            self._tokens -= sum(len(ids) + ANSWER_TOKENS for _, ids, _ in self._answers.pop(next(iter(self._answers))))

    def of(self, tokens: NDArray[np.int32]) -> list[Answer]:
        """Returns the answers to the beginnings of a sample's tokens, int32 [T]."""
        keys = ((length, token_digest(tokens[:length])) for length in {length for length, _ in self._answers} if length < len(tokens))
        return [answer for key in keys for answer in self._answers.get(key, ())]


def _answer(start: int, given: dict[str, Any]) -> Answer:
    entries = given["meta_info"].get("output_token_logprobs")
    if entries is None:
        return start, np.array(given["output_ids"], np.int32), None
    return start, np.array([entry[1] for entry in entries], np.int32), np.array([entry[0] for entry in entries], np.float32)


class SampleCheck:
    """Checks the samples of one replica's functions. A doubt is logged once for each function and field."""

    def __init__(self, service: Service, tokenizer: Tokenizer) -> None:
        self._log, self._tokenizer, self._special = service.log, tokenizer, tokenizer.special_tokens
        self._skipped = tokenizer.skipped_tokens
        self.answers = EngineAnswers(tokenizer.stop_ids)
        self._doubted: set[tuple[str, str]] = set()

    def checked(self, sample: Sample, task: Task, prompt: object, called: str | None, mask: Sequence[int] | None = None) -> Sample:
        """Returns a sample with the texts of the model's own turns. Raises BadMessage for one that contradicts itself or the engine.

        ``prompt``: as the function was given it. ``called``: the function, by its field and path; None for code of Myxo's own. ``mask``: as
        the function set it, where the sample's own has been cleared since."""
        trained = (sample.mask if mask is None or len(mask) != len(sample.mask) else np.asarray(mask)) != 0
        own = sampled(trained, sample.log_probs)
        if called is not None:
            known, whole = self._compared(sample, task, prompt, called)
            # where the engine's answers account for all that is trained, log-probs of other tokens are placeholders
            own = known if whole and known.any() and known[trained].all() else own | known
        # a function may leave special tokens out of its text: they are no part of an answer then
        plain = task.sampling.skip_special_tokens is True or not any(token in sample.text for token in self._skipped)
        return replace(sample, turns=turns_of(own, sample.response, lambda ids: self._tokenizer.decode(ids, plain)))

    def _compared(self, sample: Sample, task: Task, prompt: object, called: str) -> tuple[NDArray[np.bool_], bool]:
        """Returns which tokens of the response the engine is known to have sampled, bool [R], and whether all of its answers are known.
        Raises BadMessage as `checked`."""
        answers = self.answers.of(np.concatenate([sample.prompt, sample.response]))
        given = task.prompt_tokens if sample.prompt_text == prompt else None
        whole = self.answers.whole and task.partial is None  # else its beginning may be another replica's
        own, refused, doubts = compared(sample, given, answers, self._tokenizer.decode, self._special, whole)
        if refused is not None and not is_evaluation(task.group):
            raise BadMessage(f"{called}: sample {sample.name}: {refused}")
        for field in doubts.keys() - {known for by, known in self._doubted if by == called}:
            self._doubted.add((called, field))
            self._log.warning("sample_doubtful", function=called, sample=sample.name, field=field, error=doubts[field])
        return own, whole


declare_metrics("engine_requests_denied_total | requests | of others to the engine that were not passed on")

# What of `ROUTES` generates. Gateways have a route of their own besides, `GENERATE_PATH`, by their key.
GENERATIONS: dict[str, type[PublicRequest]] = {"/generate": GenerateRequest, "/v1/chat/completions": ChatRequest}
ANSWER_BYTES = 256 * 2**20  # the largest answer that is not streamed
SPARE_CONNECTIONS = 256  # the connections that may be open beyond the limit of requests: the process has descriptors for other things, too

# The deadlines for the engine's answer to a short call, and for the next request's head on a connection.
CALL_SECONDS, IDLE_SECONDS = 10.0, 60.0
POLL_INTERVAL_S = 0.05

# The answer to a generation of a call that was stopped.
ABORTED = {
    "text": "",
    "output_ids": [],
    "meta_info": {
        "finish_reason": {"type": "abort", "message": "the rollout was stopped"},
        "prompt_tokens": 0,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "output_token_logprobs": [],
    },
}

ROUTING_HEADER = "X-SMG-Routing-Key"  # how slime's adapters name the sample that a request is for

# The fields of a model that are shown. The engine's own answer tells where its files lie, too.
MODEL_FIELDS = ("id", "object", "created", "owned_by", "max_model_len")


class _BoundedServer(web.Server):
    def __init__(self, connections: int, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self._most = connections

    def __call__(self) -> Any:
        return super().__call__() if len(self.connections) < self._most else _Closing()


class _Closing(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class EngineProxy(EndpointServer):
    """Serves one replica's engine to others.

    Args:
        served: the replica's version. engine: returns its engine's client, if there is one. limit: requests at once.
        generate_s: seconds for one generation, from its request to the end of its answer. wait_s: of them, for weights to be changed.

    Attributes:
        address: host and port, once it is open.
        public: whether `ROUTES` are served. gateway_key: the key of gateways; without one they are not served. renew_key:
            returns the key that the store has by now, where a gateway comes with another.
        calls: requests of the user's generate functions by the token of their call (`shared.hooks.slime.http_requests`); a request of a
            call that was stopped is answered as one that the engine has aborted.
        sessions: of calls in progress, by their sample's ``session_id``: requests that name one become turns of gateways.
        answers: remembers what the engine answered, where samples are checked by it.
        most_kept: the ``top_k`` of requests that ask for the tokens that the sampler kept and have none; 0: such are refused.
    """

    def __init__(
        self,
        served: ServedVersion,
        engine: Callable[[], EngineClient | None],
        metrics: Metrics,
        limit: int,
        generate_s: float,
        wait_s: float,
    ) -> None:
        self._served, self._engine, self._metrics, self._limit = served, engine, metrics, limit
        self._generate_s, self._wait_s = generate_s, wait_s
        self._requests = 0
        # bodies stay as they were sent: none is unpacked
        super().__init__(lambda: _BoundedServer(limit + SPARE_CONNECTIONS, self._handle, keepalive_timeout=IDLE_SECONDS, **RAW))
        self.public, self.gateway_key = True, ""
        self.renew_key: Callable[[], Awaitable[str]] | None = None
        self.calls: dict[str, Requests] = {}
        self.sessions: dict[str, Callable[[GenerateRequest], Awaitable[tuple[int, bytes, str]]]] = {}
        self.answers: EngineAnswers | None = None
        self.most_kept = 0
        self.adapters: Adapters | None = None
        self.rule: MediaRule | None = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await self._answer(request)
        except RequestDenied as denied:
            self._metrics.add("engine_requests_denied")
            return _refusal(denied.status, denied.reason)
        except (InvalidRequest, BadMessage) as error:
            return _refusal(HTTPStatus.BAD_REQUEST, str(error))
        except EngineError as error:  # what an engine finds wrong with a request, another one would, too
            wrong = error.status == HTTPStatus.BAD_REQUEST
            return _refusal(HTTPStatus.BAD_REQUEST if wrong else HTTPStatus.BAD_GATEWAY, error.reason if wrong else str(error))
        except TimeoutError:
            return _refusal(HTTPStatus.GATEWAY_TIMEOUT, f"the engine gave no complete answer within {self._generate_s:g} s")
        except (MyxoError, ClientError) as error:
            return _refusal(HTTPStatus.BAD_GATEWAY, str(error))

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.gateway_key and (request.method, request.raw_path) == ("POST", GENERATE_PATH):
            async with self._admitted():
                return await self._generate_turn(request)
        if self.gateway_key and request.raw_path.startswith(PREFILL_PATH + "/"):
            return await self._prefill(request)
        if not self.public or (request.method, request.raw_path) not in ROUTES:
            raise RequestDenied(
                HTTPStatus.NOT_FOUND, "this address takes " + ", ".join(sorted(map(" ".join, ROUTES))) + ", and nothing else"
            )
        if (kind := GENERATIONS.get(request.raw_path)) is not None:
            return await self._generate_named(request, kind)
        client = self._present()
        if request.raw_path == "/health":
            if self._served.serving:  # it answers nothing while it is paused
                await client.transport.get("/health", CALL_SECONDS)
            return web.json_response({"status": "ok"})
        listed = await client.transport.get("/v1/models", CALL_SECONDS)
        models = [{field: model[field] for field in MODEL_FIELDS if field in model} for model in listed["data"]]
        return web.json_response({"object": "list", "data": models})

    async def _generate_turn(self, request: web.BaseRequest) -> web.StreamResponse:
        await self._check_key(request)
        self._present()
        asked = TurnRequest.decode(await body_of(request, CONTENT_TYPE, KEYED_BYTES))
        client = await self._serving()
        if client.version < asked.min_version:
            raise RequestDenied(HTTPStatus.CONFLICT, f"this replica serves version {client.version}, older than {asked.min_version}")
        life, limit = self._served.incarnation, asked.sampling.max_new_tokens
        wanted = GenerationRequest(asked.input_ids, limit, seed=asked.seed, structural_tag=asked.structural_tag, top_count=asked.top_count)
        shown = None if self.rule is None else ShownPictures(self.rule, asked.pictures)
        wanted = replace(wanted, kept=asked.kept, prompt_log_probs=asked.scores_prompt, shown=shown)
        pauses = client.retracting_pauses
        if asked.stream:
            return await self._stream_generation(request, client, wanted, asked)
        seconds = min(asked.seconds, self._generate_s)
        named = nullcontext() if asked.weights is None or self.adapters is None else self.adapters.serving(client, asked.weights)
        async with named as adapter:
            [found] = await client.generate_group([replace(wanted, adapter=adapter)], asked.sampling, deadline=seconds)
        self._still(life)
        return web.Response(body=_generation_of(found, client.retracting_pauses - pauses).encode(), content_type=CONTENT_TYPE)

    async def _check_key(self, request: web.BaseRequest) -> None:
        given = request.headers.get(KEY_HEADER, "").encode()
        if not hmac.compare_digest(given, self.gateway_key.encode()) and self.renew_key is not None:
            self.gateway_key = await self.renew_key()  # the store may have been emptied
        if not hmac.compare_digest(given, self.gateway_key.encode()):
            raise RequestDenied(HTTPStatus.UNAUTHORIZED, "the gateways' key is not this run's")

    async def _prefill(self, request: web.BaseRequest) -> web.StreamResponse:
        """Computes prompts for a decode engine that serves a version, once this engine serves it, too; confirms that nothing else did."""
        await self._check_key(request)
        self._present()
        wanted, end = request.headers.get(VERSION_HEADER, ""), asyncio.get_running_loop().time() + self._wait_s
        body = orjson.loads(await body_of(request, most=KEYED_BYTES))
        client = await self._serving()
        while wanted.isdecimal() and client.version < int(wanted) and asyncio.get_running_loop().time() <= end:
            await asyncio.sleep(POLL_INTERVAL_S)  # its part of that push is about to end
            client = await self._serving()
        life, cache_key, sent = self._served.incarnation, client.cache_key, False
        try:
            if str(client.version) != wanted:
                raise RequestDenied(HTTPStatus.CONFLICT, f"this prefill engine serves version {client.version}, not {wanted}")
            sent = True
            own = {"stream": False, "extra_key": cache_key}
            answer = await client.transport.post(
                request.raw_path.removeprefix(PREFILL_PATH), body | own, self._generate_s, "it is being aborted"
            )
            self._still(life)
            if client.cache_key != cache_key:
                raise RequestDenied(HTTPStatus.CONFLICT, f"this prefill engine serves version {client.version} by now, not {wanted}")
            if was_aborted(answer):
                raise RequestDenied(HTTPStatus.BAD_GATEWAY, "the prefill engine has aborted it")
            return web.json_response({})
        except BaseException:
            for rid in rids_of(body) if sent else ():
                client.abandon(rid)
            raise

    async def _stream_generation(
        self, request: web.BaseRequest, client: EngineClient, wanted: GenerationRequest, asked: TurnRequest
    ) -> web.StreamResponse:
        """Answers a gateway piece by piece. Where it cannot continue the connection breaks: what was sent is good."""
        life, response = self._served.incarnation, web.StreamResponse(headers={"Content-Type": CONTENT_TYPE})
        pauses = client.retracting_pauses
        try:
            pieces = client.generate_live(wanted, asked.sampling, deadline=min(asked.seconds, self._generate_s))
            async with aclosing(pieces):
                async for found in pieces:
                    self._still(life)
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(_generation_of(found, client.retracting_pauses - pauses).framed())
            await response.write_eof()
        except (MyxoError, ClientError, RequestDenied, TimeoutError) as error:
            if not response.prepared:
                raise
            raise ConnectionResetError(str(error)) from error
        return response

    async def _generate_named(self, request: web.BaseRequest, kind: type[PublicRequest]) -> web.StreamResponse:
        """Answers a request by a turn of a gateway where it names a call's sample and can be one, else by this engine."""
        turn = None if CALL_HEADER in request.headers else self.sessions.get(request.headers.get(ROUTING_HEADER, ""))
        body = None if turn is None else await body_of(request)
        if turn is not None and body is not None:
            asked = parse_request(kind, body, UNBOUNDED)
            if isinstance(asked, GenerateRequest) and asked.is_turn:
                status, whole, fixed = await turn(asked)  # not among the admitted ones: the gateway's own request is
                if status == HTTPStatus.OK and self.answers is not None:
                    self.answers.add(asked, whole)
                headers = {TASK_HEADER: fixed} if fixed else {}
                return web.Response(status=status, body=whole, headers=headers, content_type="application/json")
        async with self._admitted():
            return await self._generate(request, kind, body)

    async def _generate(self, request: web.BaseRequest, kind: type[PublicRequest], body: bytes | None) -> web.StreamResponse:
        self._present()  # before a body is read that no one would answer
        body = await body_of(request) if body is None else body
        client = await self._serving()
        engine, life, rid = client.capabilities, self._served.incarnation, f"{uuid.uuid4().hex}$"
        parsed = parse_request(kind, body, engine.vocab_size, engine.speculates)
        response: web.StreamResponse | None = None
        kept = min(self.most_kept, client.capabilities.vocab_size)
        call = self.calls.get(request.headers.get(CALL_HEADER, ""), Requests())
        if call.stopped.is_set() and kind is GenerateRequest:
            return web.json_response(ABORTED)
        try:
            async with (
                asyncio.timeout(self._generate_s),
                _counted(call, rid),
                client.transport.stream(request.raw_path, engine_body(parsed, rid, client.cache_key, kept)) as answer,
            ):
                headers = {"Content-Type": answer.content_type}
                if self.answers is not None and parsed.stream:
                    self.answers.add(parsed, b"")
                if not parsed.stream:
                    whole = await _whole(answer)
                    self._still(life)
                    client.check_text(whole)
                    if answer.status == HTTPStatus.OK:
                        whole = self._told(parsed, whole, f"{client.url}/generate")
                    return web.Response(status=answer.status, body=whole, headers=headers)
                response = web.StreamResponse(status=answer.status, headers=headers)
                await response.prepare(request)
                async for event in whole_events(answer):
                    self._still(life)
                    client.check_text(event)
                    await response.write(event)
                await response.write_eof()
                return response
        except BaseException as error:
            client.abandon(rid)
            if response is not None and isinstance(error, Exception):
                raise ConnectionResetError(str(error)) from error  # its status has been sent: the connection breaks off
            raise

    def _told(self, request: PublicRequest, answer: bytes, where: str) -> bytes:
        """Returns an answer as it is passed on, and remembers it where samples are checked by it."""
        if isinstance(request, GenerateRequest) and request.returns_kept:
            answer = with_nuclei(answer, where)
        if self.answers is not None:
            answer = _ended(request, answer, self.answers.ends)
            self.answers.add(request, answer)
        return answer

    def _present(self) -> EngineClient:
        """Returns the engine of a replica that holds a verified version, or is getting one."""
        client, served = self._engine(), self._served
        if client is None or not (served.has_weights or served.asleep or served.target is not None):
            raise RequestDenied(HTTPStatus.SERVICE_UNAVAILABLE, f"this replica is {self._served.state}: it holds no verified weights")
        return client

    async def _serving(self) -> EngineClient:
        """Returns the engine once its weights are not being changed. No deadline runs while a trainer computes on its GPUs."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._wait_s
        while not self._served.serving:
            self._present()
            if self._served.asleep:
                end = loop.time() + self._wait_s
            elif loop.time() > end:
                raise RequestDenied(HTTPStatus.SERVICE_UNAVAILABLE, f"the weights were still being changed after {self._wait_s:g} s")
            await asyncio.sleep(POLL_INTERVAL_S)
        return self._present()

    def _still(self, life: int) -> None:
        if self._served.incarnation != life:
            raise RequestDenied(HTTPStatus.SERVICE_UNAVAILABLE, "the replica's weights became untrusted while it generated this")

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        if self._requests >= self._limit:
            raise RequestDenied(HTTPStatus.TOO_MANY_REQUESTS, f"{self._limit} requests are being served")
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1


def _generation_of(found: Generation, pauses: int) -> TurnGeneration:
    """Returns the answer to a gateway. ``pauses``: those in the meantime that put running requests back, for no want of memory."""
    return TurnGeneration(
        completion=found.tokens,
        log_probs=found.log_probs,
        spans=found.spans,
        finish=found.finish,
        cached=found.cached_tokens,
        retractions=max(0, found.retractions - pauses),
        top_log_probs=found.top_log_probs,
        prompt_log_probs=found.prompt_log_probs,
        **({} if found.kept is None else {"kept": found.kept.marked()}),
    )


def _ended(request: PublicRequest, answer: bytes, ends: Sequence[int]) -> bytes:
    """Returns an answer to a function in which what was aborted at its end has stopped there, or it would be continued behind it: stock
    engines abort without a look at the last tokens. ``ends``: ids that end the model's turns."""
    if isinstance(request, GenerateRequest) and b'"abort"' in answer and not any(one.ignore_eos for one in request.sampling):
        with suppress(LookupError, TypeError, ValueError):  # what cannot be read is refused where it is used
            found, tokens = orjson.loads(answer), {*ends, *(token for one in request.sampling for token in one.stop_token_ids)}
            texts = [text for one in request.sampling for text in one.stop]
            for one in found if isinstance(found, list) else [found]:
                over = not tokens.isdisjoint(one["output_ids"][-1:]) or any(map(one.get("text", "").__contains__, texts))
                if over and one["meta_info"]["finish_reason"]["type"] == "abort":
                    one["meta_info"]["finish_reason"] = {"type": "stop"}
            return orjson.dumps(found)
    return answer


@asynccontextmanager
async def _counted(call: Requests, rid: str) -> AsyncIterator[None]:
    own = rid.removesuffix("$")
    call.rids.add(own)
    try:
        yield
    finally:
        call.rids.discard(own)


async def _whole(answer: ClientResponse) -> bytes:
    whole = bytearray()
    async for chunk in answer.content.iter_any():
        whole += chunk
        if len(whole) > ANSWER_BYTES:
            raise RequestDenied(
                HTTPStatus.BAD_GATEWAY, f"the answer has more than {ANSWER_BYTES} bytes: ask for less at once, or for a stream"
            )
    return bytes(whole)


def _refusal(status: HTTPStatus, reason: str) -> web.Response:
    response = web.Response(status=status, body=json.dumps({"error": reason}).encode(), content_type="application/json")
    if status != HTTPStatus.BAD_REQUEST:
        response.force_close()  # of what follows on this connection nothing is read
    return response
