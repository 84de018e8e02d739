"""What the engine's log-probs must be, from transformers' forward pass."""

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from transformers import DynamicCache, Qwen3ForCausalLM

Array = NDArray


def log_probs(model: Qwen3ForCausalLM, prompt: Array, output: Array, temperature: float = 1.0, banned: Sequence[int] = ()) -> Array:
    """float32 [T]: log-probs of ``output``, int32 [T], after ``prompt``, int32 [P], where tokens that are ``banned`` cannot be drawn."""
    sequence = torch.tensor([*prompt, *output]).long()[None]
    with torch.no_grad():
        logits = model(sequence).logits[0, len(prompt) - 1 : -1]
    logits[:, list(banned)] = float("-inf")
    return _of(logits, sequence[0, len(prompt) :], temperature)


def top_log_probs(model: Qwen3ForCausalLM, prompt: Array, output: Array, count: int) -> tuple[Array, Array]:
    """float32 [T, K] and int64 [T, K]: the likeliest tokens at each place of ``output``, after ``prompt``."""
    with torch.no_grad():
        logits = model(torch.tensor([*prompt, *output]).long()[None]).logits[0, len(prompt) - 1 : -1]
    found = logits.float().log_softmax(-1).topk(count)
    return found.values.numpy(), found.indices.numpy()


def log_probs_with_kept_cache(old: Qwen3ForCausalLM, new: Qwen3ForCausalLM, prompt: Array, output: Array, boundary: int) -> Array:
    """float32 [T]: as ``log_probs``, where the weights change in place before ``output[boundary]`` is drawn.

    What was computed before stays: the keys and values of all tokens before ``output[boundary - 1]``, the last one that
    was drawn but not yet fed back, are the old model's.
    """
    return log_probs_over_pushes([(old, boundary), (new, len(output))], prompt, output)


def log_probs_over_pushes(drawn: Sequence[tuple[Qwen3ForCausalLM, int]], prompt: Array, output: Array) -> Array:
    """float32 [T]: as ``log_probs_with_kept_cache``, over any number of pushes. ``drawn``: each model, and the end of what it drew."""
    sequence, cache, fed = torch.tensor([*prompt, *output]).long()[None], DynamicCache(), 0
    logits = []
    with torch.no_grad():
        for model, end in drawn:
            until = len(prompt) + end - 1  # the last token that is drawn is fed by whoever draws the next one
            logits.append(model(sequence[:, fed:until], past_key_values=cache, use_cache=True).logits[0])
            fed = until
    return _of(torch.cat(logits)[len(prompt) - 1 :], sequence[0, len(prompt) :], 1.0)


def _of(logits: torch.Tensor, tokens: torch.Tensor, temperature: float) -> Array:
    drawn = (logits.float() / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return drawn.numpy()
