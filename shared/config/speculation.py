"""Speculative decoding: which of SGLang's flags `rollout.speculation` stands for, and what does not go with them.

A draft guesses the next tokens, and one pass of the model verifies them all. An engine accepts each with the probability by which it keeps
the policy's distribution exactly (Leviathan et al. 2023; on a CPU the target is sampled first, and drafts that are equal to it are
accepted). It keeps that of penalties and of a least length only nearly, and on GPUs leaves min_p out, so these are refused beside it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from shared.config.sglang_flags import plain_name
from shared.runtime.errors import ConfigError

Speculation = Literal["off", "mtp", "draft", "ngram", "auto"]

ALGORITHM, DRAFT = "speculative-algorithm", "speculative-draft-model-path"

# SGLang's algorithms whose draft may be layers of the model's own checkpoint, and those without a draft; all others need a checkpoint.
OF_THE_MODEL, WITHOUT_A_DRAFT = ("EAGLE", "NEXTN"), ("NGRAM", "UNO", "NONE")
ALGORITHMS = (*OF_THE_MODEL, *WITHOUT_A_DRAFT, "EAGLE3", "STANDALONE", "DFLASH", "DSPARK", "FROZEN_KV_MTP")

# Keys of ``config.json`` that count the layers which draft.
DRAFT_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "mtp_num_layers")

LENGTHS = (256.0, 1024.0, 4096.0, math.inf)  # the bounds of responses, in tokens, by which the acceptance of drafts is told

STEPS, WIDTH, TOKENS = "speculative-num-steps", "speculative-eagle-topk", "speculative-num-draft-tokens"
CHAIN = {STEPS: 3, WIDTH: 1, TOKENS: 4}
OF_KIND: Mapping[str, Mapping[str, Any]] = {
    "mtp": {ALGORITHM: "EAGLE", **CHAIN},
    "draft": {ALGORITHM: "STANDALONE", **CHAIN},
    "ngram": {ALGORITHM: "NGRAM"},
}


def draft_layers(model_config: Mapping[str, Any]) -> int:
    """Returns how many layers of a checkpoint draft. ``model_config``: its ``config.json``."""
    counts = {**(model_config.get("text_config") or {}), **model_config}
    return max((count for name in DRAFT_LAYERS if isinstance(count := counts.get(name), int)), default=0)


def speculation_flags(speculation: Speculation | None, given: Mapping[str, Any], model_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns SGLang's flags for a run's ``speculation``, by plain names; none where ``given`` (``rollout.sglang``) names one."""
    own = {plain_name(key): value for key, value in given.items() if value is not None and value is not False}
    if speculation in (None, "off") or ALGORITHM in own:
        return {}
    kind = speculation
    if speculation == "auto":
        kind = "draft" if DRAFT in own else "mtp" if draft_layers(model_config) else "ngram"
    steps = str(own.get(STEPS, ""))
    tokens = {TOKENS: int(steps) + 1} if steps.isdecimal() and kind in ("mtp", "draft") else {}
    return {**OF_KIND[str(kind)], **tokens}


def speculates(flags: Mapping[str, Any]) -> bool:
    """Returns whether an engine with these flags, by plain names, speculates."""
    return str(flags.get(ALGORITHM) or "NONE").upper() != "NONE"


def without_speculation(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an engine's flags less those of speculation."""
    return {name: value for name, value in flags.items() if not plain_name(name).startswith(("speculative-", "enable-draft-weights"))}


SPECULATION_OFF, SPECULATION_ON = "speculation_off", "speculation_on"  # a replica's events that its engine is restarted so
COSTS = "it costs more than it gives"  # how the reason begins by which it is switched off for good; else it is only measured without


def why_not_switched(config: Any) -> str:
    """Returns why the engines of a run (`RunConfig`) are not restarted by ``speculation = "auto"``; empty where they are."""
    rollout = config.rollout
    reasons = {
        "they share their GPUs with the trainer (trainer.colocate)": config.trainer.colocate,
        f"each spans {rollout.nodes_per_engine} nodes": rollout.nodes_per_engine > 1,
        f"each is one of a pair (worker_type = {rollout.worker_type})": rollout.worker_type in ("prefill", "decode"),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def wrong_sizes(flags: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each size of drafts that SGLang would fail at or change by itself."""
    sizes = {name: str(flags[name]) for name in (STEPS, WIDTH, TOKENS) if flags.get(name) is not None}
    wrong = [name for name, size in sizes.items() if not size.isdecimal() or int(size) < 1]
    for name in wrong:
        yield ConfigError(f"rollout.sglang.{name}", flags[name], "an integer of at least 1")
    if not wrong and len(sizes) == 3 and sizes[WIDTH] == "1" and int(sizes[TOKENS]) != (whole := int(sizes[STEPS]) + 1):
        yield ConfigError(f"rollout.sglang.{TOKENS}", flags[TOKENS], f"{whole}, one more than {STEPS}: drafts are a chain")


def is_chain(flags: Mapping[str, Any]) -> bool:
    """Returns whether drafts are a chain: accepted tokens stay where the cache has them."""
    return str(flags.get("speculative-eagle-topk", 1)) == "1" and str(flags.get(ALGORITHM)).upper() != "NGRAM"


RESHAPING = {"min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0, "min_tokens": 0}
"""Sampling parameters that the verification of drafts applies for the first place alone, or not at all → the value without effect."""


def reshaped(parameters: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each parameter of a request by which an engine that speculates cannot sample."""
    for name, neutral in RESHAPING.items():
        if (value := parameters.get(name, neutral)) not in (None, neutral):
            yield ConfigError(name, value, "none where the engine speculates (rollout.speculation): drafts are verified without it")
