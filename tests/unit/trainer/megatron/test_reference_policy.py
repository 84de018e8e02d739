"""A reference policy that starts from a checkpoint of its own."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from services.trainer.actor import Actor
from services.trainer.parallel.checkpoint import MARKER
from services.trainer.reference_policy import ReferencePolicy
from tests.unit.trainer.megatron import rank_steps


def in_place(reference: ReferencePolicy, actor: Actor) -> dict[str, Any]:
    with reference.in_place_of_the_policy():
        return rank_steps.exported(actor)


def same(found: dict[str, Any], wanted: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_it_is_that_checkpoint_until_the_policy_takes_its_place(
    make_actor: Callable[..., Actor], hf: Callable[[str], Path], tmp_path: Path
) -> None:
    own, policy = tmp_path / "own", hf("qwen3")
    shutil.copytree(policy, own)
    other = {name: tensor + 0.25 for name, tensor in load_file(policy / "model.safetensors").items()}
    save_file(other, own / "model.safetensors", metadata={"format": "pt"})
    actor = make_actor("qwen3")
    before = rank_steps.exported(actor)
    reference = ReferencePolicy(actor, tmp_path / "reference", 2, tmp_path / "checkpoints", own)
    reference.save_first()
    reference.load(0)
    assert same(in_place(reference, actor), other) and same(rank_steps.exported(actor), before)
    assert not (tmp_path / "reference").exists(), "nothing has to be kept of version 0"

    rank_steps.steps(actor, 2)
    reference.renew(1)
    assert same(in_place(reference, actor), other)
    trained = rank_steps.exported(actor)
    reference.renew(2)
    assert same(in_place(reference, actor), trained) and not same(trained, before)

    reference.renew(3)
    rank_steps.steps(actor, 1)
    reference.renew(5)  # as where no step ends at 4
    later = rank_steps.exported(actor)
    assert same(in_place(reference, actor), later) and not same(later, trained)

    for steps, wanted in ((1, other), (2, trained), (3, trained), (5, later)):  # as a resume loads them
        resumed = ReferencePolicy(actor, tmp_path / "reference", 2, tmp_path / "checkpoints", own)
        resumed.load(steps)
        assert same(in_place(resumed, actor), wanted)

    for step in (3, 6):  # the newest is not there yet when the reference of 6 is made: a resume would begin at 3
        if step == 6:
            reference.renew(6)
            assert (tmp_path / "reference-00000002").is_dir()
        kept = tmp_path / "checkpoints" / f"step_{step:08d}"
        kept.mkdir(parents=True)
        (kept / MARKER).touch()
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000003")
    reference.renew(8)
    assert sorted(path.name for path in tmp_path.glob("reference*")) == ["reference-00000006", "reference-00000008"]
