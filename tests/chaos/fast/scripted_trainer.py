"""The trainer with its optimizer step scripted: loop, pushes, checkpoints, snapshots, reports are production's, on Megatron's tiny model.

A step sets every parameter to what `scripted_weights` says follows from its own tokens and the weights before. Its files in the run's
directory tell whoever disturbs it where it is: ``phase`` holds "save" while a checkpoint is being written; an export whose name stands in
``held`` makes ``writing-NAME``, and is not written on while that is so.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.trainer import rank, role_worker
from services.trainer.__main__ import prepare_environment
from services.trainer.actor import Actor, StepResult
from services.trainer.megatron.hf_weights import parameters
from services.trainer.packing import PackedBatch
from services.trainer.parallel import export
from services.trainer.parallel.export import HfParts
from services.trainer.parallel.loss_function import LossFunction
from shared.process.child_process import die_with_parent
from shared.schema.sample import token_digest
from shared.service.service_base import exit_code
from tests.chaos.fast.scripted_weights import first_state, next_state, number_of

STEP_SECONDS = float(os.environ.get("MYXO_CHAOS_STEP_SECONDS", "0.05"))
LOG_PROB = -1.0
"""Of every token, by the engine's account and by the trainer's."""

ROOT = "MYXO_CHAOS_ROOT"
"""The variable that names the run's directory."""

STATE = "scripted_state"
"""The name under which a checkpoint holds the state that its weights follow from."""


class ScriptedActor(Actor):
    """Megatron's model, of which every parameter is one number."""

    state = first_state()
    steps = 0

    def log_probs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [torch.full((len(batch.tokens),), LOG_PROB) for batch in batches]

    def train_step(
        self,
        batches: Sequence[PackedBatch],
        loss_fn: LossFunction,
        *,
        need_entropy: bool = False,
        temperature: float | None = None,
        before: Callable[[], None] | None = None,
    ) -> StepResult:
        if before is not None:
            before()
        time.sleep(STEP_SECONDS)
        totals: dict[str, float] = {}
        for batch, found in zip(batches, self.log_probs(batches), strict=True):
            entropy = torch.zeros_like(found) if need_entropy else None
            _, metrics = loss_fn(found, entropy, batch)
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        self.model.readers.wait("optimizer step")
        self.state, self.steps = next_state(self.state, trained_digests(batches)), self.steps + 1
        self.fill()
        self.optimizer.updates += 1
        return StepResult(totals.get("loss", 0.0), totals, 1.0, self.optimizer.lr)

    @torch.no_grad()
    def fill(self) -> None:
        """Makes the parameters what the state says."""
        for local in parameters(self.model.modules, self.model.config, self.model.architecture):
            local.parameter.fill_(number_of(self.state, self.steps, local.recipe.tensors[0][0]))

    def save_checkpoint(
        self, root: str | Path, step: int, extra: dict[str, Any] | None = None, keep: int | None = None, *, wait: bool = True
    ) -> Path:
        phase = Path(root).parent / "phase"
        phase.write_text("save")
        try:
            return super().save_checkpoint(root, step, {**(extra or {}), STATE: [self.state.hex(), self.steps]}, keep, wait=wait)
        finally:
            phase.unlink(missing_ok=True)

    def load_checkpoint(self, root: str | Path, step: int | None = None, *, reset_optimizer_states: bool = False) -> dict[str, Any]:
        extra = super().load_checkpoint(root, step, reset_optimizer_states=reset_optimizer_states)
        state, self.steps = extra.pop(STATE)
        self.state = bytes.fromhex(state)
        for local in parameters(self.model.modules, self.model.config, self.model.architecture):
            expected = number_of(self.state, self.steps, local.recipe.tensors[0][0])
            if {local.parameter.min().item(), local.parameter.max().item()} != {expected}:
                raise AssertionError(f"the checkpoint of step {step} holds other weights in {local.name} than it says")
        return extra


class HeldParts(HfParts):
    """An export that waits while its name stands in ``held``."""

    def write(self) -> dict[str, str]:
        root = Path(os.environ[ROOT])
        while self.target.name in _lines(root / "held"):
            (root / f"writing-{self.target.name}").touch()
            time.sleep(0.02)
        return super().write()


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def trained_digests(batches: Sequence[PackedBatch]) -> list[int]:
    """Returns the digests of the sequences that have a trained token."""
    found = []
    for batch in batches:
        tokens, mask = batch.tokens.numpy(), batch.loss_mask.numpy() > 0
        for start, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            if mask[start:end].any():
                found.append(token_digest(tokens[start:end]))
    return found


def main() -> None:
    """Runs the only rank of the run that the environment names."""
    config, _ = rank.read_run()
    prepare_environment(config)
    role_worker.Actor = ScriptedActor  # type: ignore[misc]
    os.environ[ROOT] = str(config.run.root)
    export.HfParts = HeldParts  # type: ignore[misc]
    rank.main("actor")


if __name__ == "__main__":
    die_with_parent()
    sys.exit(exit_code("trainer", lambda: rank.reported(main)))
