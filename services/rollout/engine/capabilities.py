"""The capabilities of one engine, read from it once when a client connects, and the number of tokens that it has drawn.

Two generations of SGLang are in use. From 0.5.21 on, a weight push lies between ``/begin_weight_update`` and
``/end_weight_update``, and is refused outside; before, there are no such endpoints.
"""

from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from services.rollout.engine.engine_errors import EngineError
from services.rollout.engine.transport import EngineTransport
from services.rollout.slot_limit import EngineLoad
from shared.config.engine_limits import longest_sequence
from shared.runtime.safe_files import parse_json

DRAWN, BEGUN = "sglang:realtime_tokens_total", "sglang:queue_time_seconds_count"
"""Metrics of an engine: tokens by the kind of step that processed them, and requests whose prefill has begun."""

RUNNING, QUEUED = "sglang:num_running_reqs", "sglang:num_queue_reqs"
USAGE, RETRACTED = "sglang:token_usage", "sglang:num_retracted_requests_total"
"""Metrics of its load: requests that run and that wait, the share of its memory for keys and values, requests taken back for want of it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The capabilities that an engine has reported.

    Args:
        release: SGLang's version, ``0.5.20``.
        vocab_size: token ids are from 0 to this, exclusive. max_sequence: tokens of one request, input and output together.
        weight_sessions: a push must lie between begin and end.
        overlaps: a step is computed while the results of the one before are processed. A pause in place leaves that step unfinished.
        ranks: processes that each hold a part of the model (tensor parallelism).
    """

    release: str
    vocab_size: int
    max_sequence: int
    weight_sessions: bool
    overlaps: bool
    ranks: int = 1


def parse_drawn_tokens(page: str, overlaps: bool) -> int | None:
    """Returns the number of tokens that an engine has drawn, from its Prometheus page; None where the page lacks it.

    SGLang counts the tokens of its decode steps. A sample's first token is drawn by its prefill and not counted there; it is taken from the
    number of samples whose prefill has begun. An engine that ``overlaps`` its steps computes, and counts, one token beyond each sample's
    end, which makes up for it.
    """
    if DRAWN not in page:
        return None
    drawn = _sum_of(page, DRAWN, 'mode="decode"')
    return int(drawn if overlaps else drawn + _sum_of(page, BEGUN, ""))


def parse_load(page: str) -> EngineLoad | None:
    """Returns an engine's load from its Prometheus page; None where the page lacks it. With priorities, SGLang has lines for each beside
    the sum."""
    if RUNNING not in page or QUEUED not in page:
        return None
    page = "\n".join(line for line in page.splitlines() if 'priority="' not in line or 'priority=""' in line)
    usages = [float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(USAGE + "{")]
    return EngineLoad(
        running=int(_sum_of(page, RUNNING, "")),
        queued=int(_sum_of(page, QUEUED, "")),
        kv_usage=max(usages, default=0.0),
        retracted=int(_sum_of(page, RETRACTED, "")),
    )


def _sum_of(page: str, name: str, label: str) -> float:
    """Returns the sum of a metric's lines that carry the label."""
    lines = (line for line in page.splitlines() if line.startswith(name + "{") and label in line)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def read_capabilities(transport: EngineTransport, deadline: float) -> Capabilities:
    """Returns the engine's capabilities.

    Args:
        deadline: seconds, for each of the four requests.

    Raises:
        EngineError: an answer lacks a needed field, or there is no readable ``config.json``. DeadlineExceeded, EngineUnreachable.
    """
    info = await transport.get("/server_info", deadline)
    model = await transport.get("/model_info", deadline)
    served = await transport.get("/v1/models", deadline)
    try:
        config = parse_json(Path(model["model_path"], "config.json").read_bytes())
        context = served["data"][0]["max_model_len"]
        return Capabilities(
            release=info["version"],
            vocab_size=int((config if "vocab_size" in config else config["text_config"])["vocab_size"]),
            max_sequence=longest_sequence(context, info["max_total_num_tokens"], info.get("page_size") or 1),
            weight_sessions=await _has_weight_sessions(transport, deadline),
            overlaps=not info["disable_overlap_schedule"],
            ranks=int(info.get("tp_size") or 1),
        )
    except (KeyError, TypeError, IndexError, AttributeError, OSError, ValueError) as error:
        raise EngineError(transport.url, f"its description lacks something: {type(error).__name__} {error}") from error


async def _has_weight_sessions(transport: EngineTransport, deadline: float) -> bool:
    """Returns whether there is an endpoint for it. By GET nothing happens: an endpoint for POST alone answers 405, a missing one 404."""
    try:
        await transport.get("/begin_weight_update", deadline)
    except EngineError as error:
        if error.status is None:
            raise
        return error.status != HTTPStatus.NOT_FOUND
    return True
