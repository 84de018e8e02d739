"""What one engine can do, and how much: read from it once, when a client connects.

Two generations of SGLang are in use. From 0.5.21 on, a weight push lies between ``/begin_weight_update`` and
``/end_weight_update``, and is refused outside; before, there are no such endpoints.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from services.rollout.engine.engine_errors import EngineError
from services.rollout.engine.generation import SequenceLimits
from services.rollout.engine.transport import EngineTransport
from shared.config.engine_limits import longest_sequence

NOT_CHANGED = "nothing was changed"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine said about itself.

    Args:
        release: SGLang's version, ``0.5.20``. model_path: what it was launched with, or last loaded from disk.
        limits: vocabulary and longest sequence. max_running: requests that it decodes at once; more wait in its queue.
        weight_sessions: a push must lie between begin and end.
        prefix_cache: keys and values of finished requests are kept for others (the radix cache).
        overlaps: one step is being computed while the one before is being taken in. A pause in place leaves it half-way.
        ranks: processes that each hold a part of the model (tensor parallelism).
    """

    release: str
    model_path: str
    limits: SequenceLimits
    max_running: int
    weight_sessions: bool
    prefix_cache: bool
    overlaps: bool
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine is doing; it counts every few steps, so this may be some steps old.

    Args:
        running: requests being decoded. waiting: in its queue. used_tokens, token_capacity: of its KV cache.
        throughput: tokens per second generated lately, as the engine counts it.
    """

    running: int
    waiting: int
    used_tokens: int
    token_capacity: int
    throughput: float


def parse_load(answer: dict[str, Any]) -> EngineLoad:
    """The sum over an engine's data-parallel ranks, from ``/v1/loads``."""
    ranks = answer["loads"]
    return EngineLoad(
        running=sum(rank["num_running_reqs"] for rank in ranks),
        waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
        used_tokens=sum(rank["num_used_tokens"] for rank in ranks),
        token_capacity=sum(rank["max_total_num_tokens"] for rank in ranks),
        throughput=sum(rank["gen_throughput"] for rank in ranks),
    )


async def read_capabilities(transport: EngineTransport, vocab_size: int | None, deadline: float) -> Capabilities:
    """Ask the engine.

    Args:
        vocab_size: None reads it from ``config.json`` where the engine has its model; an engine on another machine, or
            one that was given a hub name, needs it told.
        deadline: seconds, for each of the four requests.

    Raises:
        EngineError: an answer without what is needed, or no ``config.json``. DeadlineExceeded, EngineUnreachable.
    """
    info = await transport.get("/server_info", deadline, NOT_CHANGED)
    model = await transport.get("/model_info", deadline, NOT_CHANGED)
    served = await transport.get("/v1/models", deadline, NOT_CHANGED)
    # Without a body and by GET nothing happens: an endpoint for POST alone answers 405, a missing one 404.
    begin = await transport.status("GET", "/begin_weight_update", deadline)
    try:
        state = (info.get("internal_states") or [{}])[0]
        return Capabilities(
            release=info["version"],
            model_path=model["model_path"],
            limits=SequenceLimits(
                vocab_size=vocab_size or _vocab_size(Path(model["model_path"]), transport.url),
                max_sequence=_longest_sequence(info, served["data"][0]["max_model_len"]),
            ),
            max_running=state.get("effective_max_running_requests_per_dp") or info["max_running_requests"],
            weight_sessions=begin != HTTPStatus.NOT_FOUND,
            prefix_cache=not info["disable_radix_cache"],
            overlaps=not info["disable_overlap_schedule"],
            ranks=int(info.get("tp_size") or 1),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise EngineError(transport.url, f"its description lacks something: {type(error).__name__} {error}") from error


def _longest_sequence(info: dict[str, Any], context: int) -> int:
    return longest_sequence(context, info["max_total_num_tokens"], info.get("page_size") or 1)


def _vocab_size(model_path: Path, url: str) -> int:
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        reason = f"its vocabulary is unknown: no readable config.json in {model_path}; give vocab_size"
        raise EngineError(url, reason) from error
    return int(config["vocab_size"] if "vocab_size" in config else config["text_config"]["vocab_size"])
