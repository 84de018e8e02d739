"""What one rank does in the tests of adapters and of frozen parameters; also run in the test's own process."""

from pathlib import Path
from typing import Any

from torch import Tensor

from services.trainer.actor import Actor
from services.trainer.backend import gather_plan
from services.trainer.reference_policy import FrozenWeights
from shared.transfer.manifest import Manifest
from tests.unit.trainer.megatron.rank_steps import actor, exported, push, steps
from tests.unit.trainer.megatron.tiny import pack, sequences


def adapters(model: Actor) -> dict[str, Tensor] | None:
    """All of them on rank 0, under PEFT's names."""
    plan = gather_plan(model.model)
    found = plan.bucket(plan.adapter_units)
    return {name: tensor.clone() for name, tensor in found if tensor is not None} or None


def train(hf_dir: Path, config: dict[str, Any], count: int = 3) -> dict[str, Any]:
    """Steps, and what they left: the policy's export, its adapters, and the export of what lies under them."""
    model = actor(hf_dir, **{"adam_eps": 1e-3, **config})
    first = adapters(model)
    results = steps(model, count)
    report = {"steps": results, "weights": exported(model), "adapters": adapters(model), "first": first}
    report["log_probs"] = model.log_probs([pack(sequences(6, seed=9))])[0]
    model.model.silence_adapters()
    return {**report, "base": exported(model)}


def saved_policies(hf_dir: Path, config: dict[str, Any], root: Path) -> dict[str, Any]:
    """Log-probs of the policy after 0, 1 and 2 steps, and of each of the first two from what was saved then, in place of the last."""
    model = actor(hf_dir, **config)
    batch = [pack(sequences(6, seed=9))]
    live = []
    for number in range(3):
        model.save_hf(root / str(number))
        live.append(model.log_probs(batch)[0])
        steps(model, 1, first=number)
    own = model.log_probs(batch)[0]
    saved = []
    for number in range(3):
        frozen = FrozenWeights.of_saved_policy(model.model, root / str(number))
        with frozen.in_place_of(model.model):
            saved.append(model.log_probs(batch)[0])
    teacher = FrozenWeights.from_hf(model.model, root / "2")
    with teacher.in_place_of(model.model):
        merged = model.log_probs(batch)[0]
    return {"live": live, "saved": saved, "merged": merged, "own": (own, model.log_probs(batch)[0])}


def pushed(hf_dir: Path, config: dict[str, Any]) -> tuple[Manifest, dict[str, Tensor]]:
    """The manifest of this rank's stage after a step, and on the stage's source what it carries."""
    model = actor(hf_dir, **config)
    steps(model, 1)
    return push(model, bucket_bytes=1500)
