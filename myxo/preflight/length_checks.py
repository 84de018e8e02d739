"""Checks that prompts and responses fit into the engine's context and the trainer's micro-batches: those that do not would fail for ever.

A prompt's length is that of the longest that was read. Where none was read (the user has a source of prompts), only lengths that fit with
no prompt are refused. What generates in place of the engine, a function or an agent, is told `rollout_max_response_len` too, and asks as it
likes: what it may generate has to fit into a micro-batch. Samples that are too long all the same are `rollout.overlong_samples`' matter.
"""

import math
from dataclasses import dataclass

from myxo.preflight.inspection import Findings, Inspection
from myxo.preflight.model_checks import positive_count
from shared.config import devices
from shared.config.engine_limits import CONTEXT_KEPT, context_length, cpu_token_capacity, longest_sequence
from shared.config.eval_views import eval_views
from shared.config.rollout_section import GENERATORS
from shared.config.sglang_flags import plain_name
from shared.runtime.errors import ConfigError

TRAINING = "data.prompt_data"


@dataclass(frozen=True)
class Limit:
    """The most tokens that a prompt and its response may have together. ``reason``: why, as the end of a sentence."""

    tokens: int
    reason: str


def check(inspection: Inspection) -> Findings:
    """Yields what is too long, for training and for evaluation."""
    config = inspection.config
    rollout, limit = config.rollout, _engine_limit(inspection)
    shortest, reported = 1, False
    prompt = inspection.longest_prompts.get(TRAINING, shortest)
    if (
        not any(getattr(rollout, name) for name in GENERATORS)
        and limit is not None
        and prompt + rollout.rollout_max_response_len > limit.tokens
    ):
        reported = True
        yield _too_long("rollout.rollout_max_response_len", rollout.rollout_max_response_len, TRAINING, prompt, limit)
    yield from _micro_batches(inspection, prompt, limit)
    if limit is None:
        return
    for view in eval_views(config):
        own, prompt = view.own.max_response_len, inspection.longest_prompts.get(view.field, shortest)
        response, context = view.config.rollout.rollout_max_response_len, view.max_context_len
        given = own is not None or config.eval.eval_max_response_len is not None
        if min(prompt + response, context or math.inf) > limit.tokens and (given or not reported):
            field = "eval.eval_max_response_len" if own is None else f"{view.field}.max_response_len"
            yield _too_long(field, response, view.field, prompt, limit)


def _too_long(field: str, response: int, prompts: str, prompt: int, limit: Limit) -> ConfigError:
    left = limit.tokens - prompt
    if left < 1:
        wanted = f"prompts of fewer than {limit.tokens} tokens, {limit.reason}; or rollout_max_prompt_len with overlong_prompts = filter"
        return ConfigError(prompts, f"a prompt of {prompt} tokens", wanted)
    return ConfigError(field, response, f"at most {left}: the longest prompt of {prompts} ({prompt} tokens) and its response are at most "
                       f"{limit.tokens} tokens, {limit.reason}")  # fmt: skip


def _micro_batches(inspection: Inspection, prompt: int, limit: Limit | None) -> Findings:
    """Yields a budget of tokens that a sample could exceed: the trainer would refuse it, the batch with it, and the next one."""
    trainer, response = inspection.config.trainer, inspection.config.rollout.rollout_max_response_len
    longest, ranks, budget = prompt + response, trainer.context_parallel_size, inspection.config.longest_sample
    if limit is not None:
        longest = min(longest, limit.tokens)
    if longest <= budget:
        return
    shared = f", which {ranks} context-parallel ranks hold together" if ranks > 1 else ""
    wanted = f"at least {-(-longest // ranks)}: the longest prompt ({prompt} tokens) and its response have up to {longest} tokens{shared}"
    shorter = f"; or rollout_max_response_len of at most {budget - prompt}" if budget > prompt else ""
    yield ConfigError("trainer.max_tokens_per_gpu", trainer.max_tokens_per_gpu, wanted + shorter)


def _engine_limit(inspection: Inspection) -> Limit | None:
    """Returns the most that the engine takes; None where the model does not say."""
    config, model = inspection.config, inspection.model_config
    flags = {plain_name(key): value for key, value in config.rollout.sglang.items()}
    known = context_length(model) if model is not None else None
    given = positive_count(flags.get("context-length"))
    context = given or known
    if context is None or model is None:
        return None
    limit = Limit(context - CONTEXT_KEPT, f"{'--sglang-context-length' if given else 'the context in config.json'} less {CONTEXT_KEPT}")
    cache = positive_count(flags.get("max-total-tokens"))
    if cache is None and devices.resolve(config.rollout.rollout_device) == "cpu":
        try:
            cache = cpu_token_capacity(model)
        except (KeyError, TypeError):  # the check of the architecture names it
            return limit
    if cache is not None and (tokens := longest_sequence(context, cache, positive_count(flags.get("page-size")) or 1)) < limit.tokens:
        return Limit(tokens, f"the engine's KV cache of {cache} tokens (--sglang-max-total-tokens)")
    return limit
