"""What one rank does in the tests that compare layouts; also run in the test's own process, as the world of one."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer.actor import Actor, ActorConfig, StepResult
from services.trainer.megatron import checkpoint, runtime
from services.trainer.megatron.checkpoint import dist_checkpointing
from services.trainer.megatron.likelihood import VocabularySlice, log_probs_and_entropy
from services.trainer.packing import PackedBatch
from shared.errors import MyxoError
from tests.unit.trainer.megatron.tiny import pack, sequences

TIMEOUT_SECONDS = 60.0
MICRO_BATCHES = 4


def actor(hf_dir: Path, **config: Any) -> Actor:
    return Actor.create(ActorConfig(**{"timeout_seconds": TIMEOUT_SECONDS, "lr": 3e-3, **config}), hf_dir)


def weighted_loss(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """A policy-gradient-like sum whose denominator is already in the weights, and an entropy term."""
    weights = batch.loss_mask * batch.fields["advantages"] / 100
    assert entropy is not None
    loss = -(weights * log_probs).sum() - 0.001 * (batch.loss_mask * entropy).sum()
    return loss, {"tokens": batch.loss_mask.sum(), "entropy": (batch.loss_mask * entropy).sum()}


def share(model: Actor, seed: int) -> list[PackedBatch]:
    """This rank's part of a global batch that is the same in every layout."""
    micro_batches = [pack(sequences(5, seed=seed * 100 + index)) for index in range(MICRO_BATCHES)]
    return micro_batches[model.data_parallel_rank :: model.data_parallel_size]


def steps(model: Actor, count: int, first: int = 0) -> list[StepResult]:
    return [model.train_step(share(model, first + i), weighted_loss, need_entropy=True) for i in range(count)]


def exported(model: Actor, bucket_bytes: int = 4096) -> dict[str, Tensor | None]:
    return {n: None if t is None else t.clone() for bucket in model.export(bucket_bytes) for n, t in bucket}


def train(hf_dir: Path, config: dict[str, Any], count: int) -> dict[str, Any]:
    model = actor(hf_dir, **config)
    results = steps(model, count)
    batch = pack(sequences(6, seed=9))
    return {"steps": results, "log_probs": model.log_probs([batch])[0], "weights": exported(model)}


def resume(hf_dir: Path, config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Two steps, a checkpoint, two more; then the same two again from the checkpoint, in a model made anew."""
    model = actor(hf_dir, **config)
    steps(model, 2)
    model.save_checkpoint(root, 2, {"prompts": [1, 2]})
    noise = torch.rand(3)
    straight = steps(model, 2, first=2)
    weights = exported(model)
    again = actor(hf_dir, **{**config, "seed": 99, "lr": 1.0})
    extra = again.load_checkpoint(root)
    noise_again = torch.rand(3)
    resumed = steps(again, 2, first=2)
    return {
        "straight": straight,
        "resumed": resumed,
        "noise": (noise, noise_again),
        "weights": (weights, exported(again)),
        "extra": extra,
    }


def load_and_train(hf_dir: Path, config: dict[str, Any], root: Path, count: int) -> list[StepResult]:
    model = actor(hf_dir, **config)
    model.load_checkpoint(root)
    return steps(model, count, first=2)


def save_after(hf_dir: Path, config: dict[str, Any], root: Path, count: int) -> list[StepResult]:
    model = actor(hf_dir, **config)
    steps(model, count)
    model.save_checkpoint(root, count)
    return steps(model, 2, first=count)


def load_and_export(hf_dir: Path, config: dict[str, Any]) -> dict[str, Tensor | None]:
    return exported(actor(hf_dir, **config))


def load_and_save(hf_dir: Path, config: dict[str, Any], target: Path) -> None:
    actor(hf_dir, **config).save_hf(target)


def likelihood_of(
    logits: Tensor, labels: Tensor, vocab: int, temperature: float, need_entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """``logits``: this rank's slice [T, rows]; the parallel groups are formed already."""
    from megatron.core import parallel_state

    slice_ = VocabularySlice.of(parallel_state.get_tensor_model_parallel_group(), logits.size(1), vocab)
    return log_probs_and_entropy(logits, labels, slice_, temperature, need_entropy)


def split_likelihood(
    hf_dir: Path, logits: Tensor, labels: Tensor, weights: Tensor, vocab: int, temperature: float
) -> tuple[Tensor, Tensor]:
    actor(hf_dir, tensor_model_parallel_size=2)
    rank = torch.distributed.get_rank()
    mine = logits.chunk(2, 1)[rank].clone().requires_grad_()
    log_probs, entropy = likelihood_of(mine, labels, vocab, temperature)
    assert entropy is not None
    values = torch.stack([log_probs, entropy])
    (gradient,) = torch.autograd.grad((values * weights).sum(), mine)
    return values.detach(), gradient


def save_and_die(hf_dir: Path, root: Path, point: str) -> None:
    """Save step 1; then be killed in the middle of a save: after the shards of step 2 are written, when its marker is
    written too, or, saving step 1 again, between the two renames that replace it."""
    model = actor(hf_dir)
    model.save_checkpoint(root, 1, {"from": "before"})
    steps(model, 1)
    die = partial(os.kill, os.getpid(), signal.SIGKILL)
    if point == "shards":
        write = dist_checkpointing.save
        dist_checkpointing.save = lambda *args, **kwargs: (write(*args, **kwargs), die())
    elif point == "marker":
        checkpoint.publish = lambda *_: die()
    else:
        rename = Path.rename
        Path.rename = lambda self, target: rename(self, target) if self.name.startswith("step_") else die()
    model.save_checkpoint(root, 1 if point == "aside" else 2, {"from": "never"})


def _wait_for(path: Path) -> None:
    ends = time.monotonic() + TIMEOUT_SECONDS
    while not path.exists():
        if time.monotonic() > ends:
            raise TimeoutError(f"{path} did not appear within {TIMEOUT_SECONDS:g} s")
        time.sleep(0.05)


def wait_for_a_sleeper(hf_dir: Path, woken: Path) -> tuple[str, str] | None:
    """Rank 1 sleeps inside its loss function until rank 0 has given up on it."""
    actor(hf_dir)  # the ranks have met; only the groups of the next model have the short deadline
    model = actor(hf_dir, timeout_seconds=6.0)

    def slow(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if model.data_parallel_rank == 1:
            _wait_for(woken)
        return log_probs.sum(), {}

    try:
        model.train_step(share(model, 0), slow)
    except MyxoError as error:
        woken.touch()
        return type(error).__name__, str(error)
    return None


def outlive_a_peer(hf_dir: Path, seen: Path) -> None:
    """Rank 1 is killed inside its loss function; rank 0 writes down the error that it gets."""
    model = actor(hf_dir)

    def fatal(log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        if model.data_parallel_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return log_probs.sum(), {}

    try:
        model.train_step(share(model, 0), fatal)
    except MyxoError as error:
        seen.write_text(f"{type(error).__name__}:{error}")
        raise


def fail_together(hf_dir: Path) -> tuple[str, str] | None:
    actor(hf_dir)
    try:
        with runtime.together("the test"):
            if torch.distributed.get_rank() == 1:
                raise ValueError("mine")
    except (MyxoError, ValueError) as error:
        return type(error).__name__, str(error)
    return None


def exchange(hf_dir: Path) -> list[Any]:
    actor(hf_dir)
    rank = torch.distributed.get_rank()
    return runtime.gather_json({"rank": rank, "text": "ü" * 70 * rank})
