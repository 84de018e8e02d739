"""What the roles decide on a rank alone: whose fault a failed pass is, and in which order things come to be on disk."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import distributed as dist

from services.trainer.batches import MicroBatch, TrainBatch
from services.trainer.loop import Trainer
from services.trainer.loss_inputs import LossInputs
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.packing import NO_VERSION, PackedBatch, pack
from services.trainer.parallel.loss_function import MicroBatchesFailed
from services.trainer.partition import Untrainable, partition_batch
from services.trainer.role_worker import RoleWorker, attributed, refuse_infinite
from shared.config.algorithm import AlgorithmSection
from shared.schema.messages import Batch, BatchGroup, Payload
from tests.support.train_samples import train_sample

FILLER = MicroBatch([], [], pack((), ()))


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def micro_batch() -> MicroBatch:
    samples = [train_sample([1, 2], [3, token]) for token in (4, 5)]
    return MicroBatch([0, 1], samples, pack(samples, [0.5, 0.5]))


def batch(step: int = 3) -> Batch:
    group = BatchGroup(group="g00000000", payload=Payload(keys=["k"], bytes=1, tokens=(4, 4)), rewards=[0.0, 1.0])
    return Batch(step=step, version=2, groups=[group])


def test_a_loss_that_is_not_finite_is_found_beside_micro_batches_without_samples(alone: None) -> None:
    partition, seen = partition_batch(batch(), 1, 1, 64), list[int]()

    def loss_of(packed: PackedBatch) -> float:
        seen.append(len(packed.tokens))
        return float("nan") if 5 in packed.tokens else 1.0

    with pytest.raises(Untrainable, match="g00000000/1: its loss is nan"):
        refuse_infinite(partition, [FILLER, micro_batch()], loss_of)
    assert seen == [4, 4]


def test_what_fails_for_micro_batches_without_samples_too_is_no_samples_fault(alone: None) -> None:
    def attempt(packed: PackedBatch) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError, match="the user's"), attributed(partition_batch(batch(), 1, 1, 64), [micro_batch(), FILLER]):
        raise MicroBatchesFailed(dict.fromkeys(range(2), ZeroDivisionError("the user's")), attempt)


@pytest.mark.parametrize(("step", "version"), [(2, 2), (3, NO_VERSION), (4, 2)])
def test_weights_are_a_versions_until_they_are_trained(step: int, version: int) -> None:
    store: Any = None
    item = TrainBatch(partition_batch(batch(step), 1, 1, 64), np.zeros((2, 1)), [[micro_batch()]], (1.0,))
    loss: Any = LossInputs(AlgorithmSection(), CustomFunctions(), store).loss(item, 2, 0)
    assert loss.batch_version == version


def test_a_trainer_that_leaves_saves_before_it_waits_for_an_export(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    trainer: Any = object.__new__(Trainer)
    for name in ("_config", "_pusher", "_colocation", "_actor", "_exporter"):
        setattr(trainer, name, SimpleNamespace())
    trainer._config.rollout, trainer._config.trained, trainer._control = SimpleNamespace(num_rollout=9), Path(), None
    trainer._progress, trainer._begun_save = SimpleNamespace(steps=3, sft_done=False), 2
    trainer._exporter.finish = lambda: done.append("export")
    trainer._actor.finish_save = lambda: done.append("checkpoint")
    trainer._pusher.wait, trainer._pusher.results, trainer._colocation.onload = (lambda: None), (lambda: []), (lambda: None)
    monkeypatch.setattr(RoleWorker, "_save", lambda _: done.append("begun"))
    trainer._save_at_once()
    assert done == ["begun", "checkpoint"]
    trainer._leave(done=False)
    assert done[2:] == ["begun", "checkpoint", "export"]
