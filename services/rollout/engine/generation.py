"""Validates the requests of a generation, and parses its answers. It is pure and does no I/O.

Versions: a span says which weights drew its tokens. Where an engine reports versions per token (``weight_versions`` in 0.5.20;
before, in `TOKEN_VERSIONS`, by its receiver), these are used; a token of unknown version has that of the one before it. Where it
only reports the version at the end, the request gets one span: of that version if it was also served when the request was sent,
else of the older of the two, so that staleness is never understated.

One correction: when an engine that overlaps its steps is paused in place, one token of each request has been drawn by
the old weights and is then counted as the new version's. Versions that were loaded in such a pause are called *late*
here: their spans begin one token later than the engine says.
"""

import uuid
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.rollout.engine.transport import Capabilities, EngineError, InvalidRequest
from shared.hooks.engine_meta import versions
from shared.schema.messages import Sampling
from shared.schema.sample import segments_of
from shared.schema.versions import TOKEN_VERSIONS

Tokens = NDArray[np.int32] | Sequence[int]
Finish = Literal["stop", "length", "abort"]

# Ends every request id on the wire. SGLang aborts every request whose id *starts with* the given one; with an end mark no id is a prefix
# of another.
RID_END = "$"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one sample of a group.

    ``tokens``: int [P], the prompt, then the tokens of earlier attempts; generation continues after them. ``max_new_tokens``: at most this
    many are generated now; it replaces the one of the sampling settings. ``rid``: the request's id, unique in the engine;
    ``EngineClient.abort`` takes it. ``ignore_eos``: continue past the model's end token, to ``max_new_tokens``. ``seed``: draw each token
    by it and the token's position, in an engine with deterministic inference; None: at random. ``routed_from``: tells the experts of its
    tokens from this one on, those of the input too; None: does not tell them."""

    tokens: Tokens
    max_new_tokens: int
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    ignore_eos: bool = False
    seed: int | None = None
    routed_from: int | None = None


class Routed(NamedTuple):
    """The experts of ``rows`` tokens of a sequence, input and output, from token ``start`` on; ``encoded`` as the engine gave them.
    ``beyond``: how many of them, at the end, are of tokens that were left out."""

    start: int
    rows: int
    encoded: str
    beyond: int = 0


class Span(NamedTuple):
    """Output tokens ``start`` to ``end`` (exclusive), all drawn under one weight version."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True)
class Generation:
    """The output of one request, without the prompt and without tokens of earlier attempts.

    ``tokens``: int32 [T]; T may be 0 after an abort. ``log_probs``: float32 [T], of exactly those tokens. ``finish``: ``stop`` (end token
    or stop string), ``length``, ``abort`` (partial: can be continued). ``spans``: cover [0, T) without gap or overlap, versions growing;
    none if T is 0. ``cached_tokens``: input tokens whose keys and values were cached. ``retractions``: times the engine put it back in the
    queue. ``routed``: the experts of its tokens, where they were asked for; None as well where it was aborted before it ran."""

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    finish: Finish
    spans: tuple[Span, ...]
    cached_tokens: int
    retractions: int = 0
    routed: Routed | None = None


def group_body(requests: Sequence[GenerationRequest], sampling: Sampling, engine: Capabilities, cache_key: str) -> dict[str, Any]:
    """Returns the body of one ``/generate`` call for a group.

    Log-probs come from the temperature-scaled distribution over the whole vocabulary; ``top_p`` and ``top_k`` limit which tokens are drawn,
    without renormalising the log-probs.

    ``engine``: the limits of its input. ``cache_key``: prefixes are shared among requests of the same key only. Raises InvalidRequest: an
    id out of the vocabulary (it would kill the engine), a sequence over the limit (the engine would refuse it, or cut it short in silence),
    no tokens, ids of requests that clash."""
    if not requests:
        raise InvalidRequest("a group without requests")
    if outside := [token for token in sampling.stop_token_ids if not 0 <= token < engine.vocab_size]:
        raise InvalidRequest(f"stop token {outside[0]} is not in [0, {engine.vocab_size})")
    rids = [request.rid for request in requests]
    if len(set(rids)) < len(rids):
        raise InvalidRequest(f"the group has a request id twice: {sorted(rids)}")
    drawn = sampling.model_dump(exclude={"skip_special_tokens", "no_stop_trim"})  # tokens come back, not text
    return {
        "rid": [wire_rid(rid) for rid in rids],
        "input_ids": [_checked_tokens(request, engine) for request in requests],
        "sampling_params": [
            {
                **drawn,
                "max_new_tokens": request.max_new_tokens,
                "min_new_tokens": _fewest(request, sampling),
                "ignore_eos": request.ignore_eos,
                **({} if request.seed is None else {"sampling_seed": request.seed}),
            }
            for request in requests
        ],
        "return_logprob": True,
        "extra_key": cache_key,
        **({} if (start := _routed_from(requests)) is None else {"return_routed_experts": True, "routed_experts_start_len": start}),
    }


def _routed_from(requests: Sequence[GenerationRequest]) -> int | None:
    """Returns the token from which on the experts of a group's sequences are asked for: one call has one answer to that."""
    return min((request.routed_from for request in requests if request.routed_from is not None), default=None)


def _fewest(request: GenerationRequest, sampling: Sampling) -> int:
    """Returns how many tokens must still be drawn: what earlier attempts drew is part of the request's input."""
    there_already = max(0, sampling.max_new_tokens - request.max_new_tokens)
    return min(request.max_new_tokens, max(0, sampling.min_new_tokens - there_already))


def wire_rid(rid: str) -> str:
    """Returns the request id as the engine gets it. Raises InvalidRequest if it is empty or holds the end mark."""
    if not rid or RID_END in rid:
        raise InvalidRequest(f"request id {rid!r}: must not be empty, nor hold {RID_END!r}")
    return rid + RID_END


def parse_group(answer: Any, requests: Sequence[GenerationRequest], version_before: int, late: Set[int], where: str) -> list[Generation]:
    """Returns the generations of a ``/generate`` answer, in the order of ``requests``.

    ``version_before``: the version the engine served when the request was sent. ``late``: versions whose first token was still drawn by the
    one before. ``where``: for errors. Raises EngineError: the answer does not fit the request."""
    if not isinstance(answer, list) or len(answer) != len(requests):
        raise EngineError(where, f"answered {str(answer)[:200]!r} to a group of {len(requests)}")
    try:
        start, pairs = _routed_from(requests), zip(answer, requests, strict=True)
        return [_parse_sample(sample, request, version_before, late, where, start) for sample, request in pairs]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EngineError(where, f"gave an answer that cannot be read ({type(error).__name__}: {error}): {str(answer)[:200]!r}") from error


def parse_piece(answer: Any, request: GenerationRequest, seen: int, version_before: int, late: Set[int], where: str) -> Generation:
    """Returns what one of a streamed answer's parts adds to the ``seen`` tokens before it; ``abort`` where more may follow. An engine tells
    in each part all tokens so far, or, with ``incremental-streaming-output``, the new ones. Otherwise as `parse_group`."""
    try:
        meta = answer["meta_info"]
        total, drawn = int(meta["completion_tokens"]), meta.get("output_token_logprobs") or []
        new, version_spans = total - seen, _spans(meta, total, version_before, late, where)
        if not 0 <= new <= len(drawn):
            raise EngineError(where, f"{request.rid}: {len(drawn)} log-probs for {new} new tokens")
        told = {**meta, "output_token_logprobs": drawn[len(drawn) - new :], "weight_versions": None, "finish_reason": meta["finish_reason"]}
        told["finish_reason"] = told["finish_reason"] or {"type": "abort"}
        ids = answer["output_ids"]
        piece = _parse_sample({"meta_info": told, "output_ids": ids[len(ids) - new :]}, request, version_before, late, where)
        spans = tuple(Span(max(start, seen) - seen, end - seen, version) for start, end, version in version_spans if end > seen)
        return replace(piece, spans=spans)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise EngineError(where, f"gave an answer that cannot be read ({type(error).__name__}: {error}): {str(answer)[:200]!r}") from error


def without_older_prefix(generation: Generation, version_before: int) -> Generation:
    """Returns a generation as if it had been aborted before its first token, where it began with keys and values of older weights.

    That is one that waited in the engine while weights were changed: it was sent to share prefixes of ``version_before``, found some, and
    drew its first token by a newer version."""
    if not generation.cached_tokens or not generation.spans or generation.spans[0].version == version_before:
        return generation
    return Generation(np.empty(0, np.int32), np.empty(0, np.float32), "abort", (), 0, generation.retractions)


def first_tokens(generation: Generation, count: int) -> Generation:
    """Returns the first ``count`` tokens of a generation, as one that stopped there."""
    spans = tuple(Span(start, min(end, count), version) for start, end, version in generation.spans if start < count)
    tokens, log_probs = generation.tokens[:count], generation.log_probs[:count]
    routed = generation.routed and generation.routed._replace(beyond=len(generation.tokens) - count)
    return replace(generation, tokens=tokens, log_probs=log_probs, finish="stop", spans=spans, routed=routed)


def parse_version(text: Any, where: str) -> int:
    """Returns a weight version as an integer. Raises EngineError for other text, which an engine has that Myxo did not launch."""
    try:
        return int(text)
    except (TypeError, ValueError):
        reason = f"serves weight version {text!r}, not an integer; set_weight_version gives it one"
        raise EngineError(where, reason) from None


def _parse_sample(
    sample: Mapping[str, Any], request: GenerationRequest, version_before: int, late: Set[int], where: str, routed_from: int | None = None
) -> Generation:
    meta = sample["meta_info"]
    if meta["id"] != wire_rid(request.rid):
        raise EngineError(where, f"answered for {meta['id']!r} where {request.rid!r} was asked")
    drawn = meta.get("output_token_logprobs") or []  # [log-prob, id, None] per token; missing if aborted unstarted
    count = len(drawn)
    tokens = np.fromiter((entry[1] for entry in drawn), np.int32, count)
    log_probs = np.fromiter((entry[0] for entry in drawn), np.float32, count)
    if not np.array_equal(tokens, sample["output_ids"]):
        raise EngineError(where, f"{request.rid}: {count} log-probs do not belong to the output {sample['output_ids']}")
    finish = meta["finish_reason"]["type"]
    if finish not in ("stop", "length", "abort"):
        raise EngineError(where, f"{request.rid}: unknown finish reason {meta['finish_reason']}")
    encoded, start = meta.get("routed_experts"), routed_from or 0
    return Generation(
        tokens=tokens,
        log_probs=log_probs,
        finish=finish,
        spans=_spans(meta, count, version_before, late, where),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        retractions=int(meta.get("num_retractions") or 0),
        routed=None if encoded is None else Routed(start, len(request.tokens) + count - 1 - start, str(encoded)),
    )


def _spans(meta: Mapping[str, Any], count: int, version_before: int, late: Set[int], where: str) -> tuple[Span, ...]:
    """Returns the spans of ``count`` tokens, by the module's rules."""
    if count == 0:
        return ()
    reported = meta.get("weight_versions")
    if reported is None and meta.get(TOKEN_VERSIONS):
        named = accumulate(versions(meta, count), lambda before, own: before if own is None else own, initial=version_before)
        spans = tuple(Span(*segment) for segment in segments_of(np.array(list(named)[1:], np.int32)))
        return _begun_late(spans, version_before, late)
    if reported is None:
        version_after = parse_version(meta["weight_version"], where)
        return (Span(0, count, min(version_before, version_after)),)
    spans = tuple(
        Span(span["start"], min(span["end"], count), parse_version(span["version"], where)) for span in reported if span["start"] < count
    )
    edges = [0, *(span.end for span in spans)]
    if edges[-1] != count or any(span.start != edge for span, edge in zip(spans, edges, strict=False)):
        raise EngineError(where, f"{meta['id']}: spans {spans} do not cover {count} tokens")
    return _begun_late(spans, version_before, late)


def _begun_late(spans: tuple[Span, ...], version_before: int, late: Set[int]) -> tuple[Span, ...]:
    """Returns the spans with every late version's beginning moved by one token, which goes to the version before it.

    The first span is moved, too, where its version was loaded after the request was sent: its first token may have been drawn before, or
    the request may only have waited. These cannot be told apart, and the older version is the safe answer."""
    count = spans[-1].end
    starts = [(span.start + (span.version in late and (span.start > 0 or span.version > version_before)), span.version) for span in spans]
    if starts[0][0] > 0:
        starts.insert(0, (0, version_before))
    ends = [*(min(start, count) for start, _ in starts[1:]), count]
    return tuple(Span(start, end, version) for (start, version), end in zip(starts, ends, strict=True) if start < end)


def _checked_tokens(request: GenerationRequest, engine: Capabilities) -> NDArray[np.int32]:
    """Returns the request's tokens as int32 [P]. Raises InvalidRequest that names the request and its error."""
    ids, name = np.asarray(request.tokens), f"request {request.rid}"
    if ids.ndim != 1 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise InvalidRequest(f"{name}: token ids are integers [P], P at least 1, not {ids.dtype} {list(ids.shape)}")
    bad = np.flatnonzero((ids < 0) | (ids >= engine.vocab_size))
    if bad.size:
        at = int(bad[0])
        raise InvalidRequest(f"{name}: token id {ids[at]} at {at} is not in [0, {engine.vocab_size})")
    if request.max_new_tokens < 1:
        raise InvalidRequest(f"{name}: max_new_tokens = {request.max_new_tokens}, at least 1")
    if ids.size + request.max_new_tokens > engine.max_sequence:
        raise InvalidRequest(
            f"{name}: {ids.size} input tokens and {request.max_new_tokens} new ones are more than the "
            f"{engine.max_sequence} that the engine holds for one sequence"
        )
    return np.ascontiguousarray(ids, np.int32)
