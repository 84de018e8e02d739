"""Conversion of a checkpoint of the torch backend into a Hugging Face one, from which either backend starts."""

from collections.abc import Callable
from pathlib import Path

from services.trainer.fsdp import all_ranks
from services.trainer.fsdp.model import assemble
from services.trainer.fsdp.shard_gathering import FsdpGatherPlan
from services.trainer.parallel import runtime
from services.trainer.parallel.checkpoint import check_architecture, policy_checkpoint, weights_only
from services.trainer.parallel.export import save_hf
from services.trainer.trainer_settings import TrainerSettings
from shared.config.trainer_section import TrainerSection
from shared.model.families import read_architecture
from shared.runtime.errors import ConfigError


def to_hf(source: Path, target: Path, hf: Path | None, step: int | None, progress: Callable[[int, int], None]) -> Path:
    """Converts a checkpoint, with adapters merged. The whole model is in host memory meanwhile, in float32.

    Args:
        source: a directory of checkpoints, or one of them. step: which; None for the newest.
        target: must not exist; it appears complete or not at all.
        hf: the Hugging Face checkpoint that the run started from, for config and tokenizer.

    Raises:
        CheckpointMissing: there is none. ConfigError: it is a critic's, or of another model than ``hf``; or the target exists.
    """
    path, marker = policy_checkpoint(source, step)
    if hf is None:
        raise ConfigError("--hf", None, f"the Hugging Face checkpoint that {path} was trained from, for config and tokenizer")
    architecture = read_architecture(hf, backend="torch")
    check_architecture(path, marker, architecture)
    if target.exists():
        raise ConfigError("TARGET", str(target), "a path where nothing is yet")
    adapted = marker.get("lora")
    lora = {"lora_rank": adapted["rank"], "lora_alpha": adapted["alpha"], "target_modules": adapted["targets"]} if adapted else {}
    settings = TrainerSettings(TrainerSection(trainer_backend="torch", train_dtype=marker["dtype"], **lora))
    runtime.start(settings.layout, 0, 600.0, all_ranks)
    try:
        model = assemble(settings, hf, architecture)
        with weights_only():
            model.read_state(model.sharded_state(), path, with_random=False, exact=False)
        plan = FsdpGatherPlan(model)
        save_hf(plan, hf, target)
        nbytes = sum(unit.nbytes(model.dtype) for unit in plan.units)
        progress(nbytes, nbytes)
    finally:
        runtime.stop()
    return target
