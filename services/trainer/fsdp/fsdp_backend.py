"""transformers' models under FSDP2 as the trainer's backend (``trainer_backend = "torch"``)."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from services.trainer.backend import Backend
from services.trainer.fsdp import all_ranks, sharded_passes
from services.trainer.fsdp.model import build
from services.trainer.fsdp.sharded_adam import FsdpOptimizer
from services.trainer.parallel import runtime
from services.trainer.parallel.runtime import deadline
from services.trainer.trainer_settings import TrainerSettings
from shared.model.families import read_architecture


def create(settings: TrainerSettings, hf_dir: Path, random: bool, initialized: Callable[[], None] | None) -> Backend:
    """Makes this rank's shards of a model; the arguments are those of `services.trainer.actor.Actor.create`."""
    trainer = settings.trainer
    for problem in trainer.torch_problems():
        raise problem
    architecture = read_architecture(hf_dir, backend="torch")
    runtime.start(settings.layout, trainer.seed, trainer.collective_timeout, all_ranks)
    if initialized is not None:
        initialized()
    model = build(settings, hf_dir, architecture, random)
    with deadline("the making of the optimizer"):
        optimizer = FsdpOptimizer(model, trainer, settings.schedule)
    return Backend(model, optimizer, sharded_passes, "the torch backend computes whole sequences", dist.get_world_size() == 1)
