"""``myxo plan CONFIG``: the memory that a config needs of its GPUs, and what would lower it; nothing is started.

Reads a run's config, or a ready config of a model alone, and the model's shape without its weights.
"""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from myxo.commands.command_arguments import add_json, positive
from myxo.commands.up import with_flags
from myxo.launch.service_plan import filled
from myxo.preflight import Source, run_plan
from myxo.preflight.inspection import Inspection
from myxo.preflight.run_plan import RunPlan
from shared.config import devices
from shared.config.config_layers import Layers, over
from shared.config.config_reading import read
from shared.config.run_config import RunConfig
from shared.hub import hub_resolve
from shared.hub.hub_resolve import FROZEN
from shared.model.architecture import Architecture
from shared.model.architecture_flags import described_shape
from shared.model.engine_plan import fewest_gpus
from shared.model.families import read_architecture, with_drafts
from shared.model.memory_plan import total_parameters
from shared.model.parallel_layout import ParallelLayout, division_problems
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, raise_problems
from shared.runtime.safe_text import json_text

# What a run needs and a plan does not: a config without it is planned all the same. The batch divides over any usual number of ranks.
STANDINS: dict[str, dict[str, Any]] = {
    "run": {"name": "plan"},
    "model": {"hf_checkpoint": "model"},
    "data": {"prompt_data": "prompts.jsonl"},
    "rollout": {"num_rollout": 1, "rollout_batch_size": 20160, "n_samples_per_prompt": 8},
}


@dataclass
class PlannedConfig:
    """A config that was read to be planned. ``plan``: with what it came to. ``notes``: what was taken for granted."""

    plan: RunPlan
    notes: list[str] = field(default_factory=list)


def planned(source: Source, gpu_bytes: int) -> PlannedConfig:
    """Returns the plan of a config on GPUs of so many bytes.

    Raises ConfigError, or Problems of several: a wrong value, no shape of the model, a layout that does not divide it.
    """
    raise_problems(source.given.problems)
    config, given, notes = _read(source)
    config, architecture = _shape(config, given, notes)
    trainer, backend = config.trainer, config.trainer.trainer_backend
    layout = ParallelLayout.of(trainer)
    raise_problems([*layout.world_problems(trainer.ranks("actor")), *division_problems(architecture, layout, trainer.megatron)])
    own = None
    if config.algorithm.has_critic and trainer.critic_load is not None:
        config = _downloaded(config, "trainer.critic_load")
        own = _read_shape(Path(str(config.trainer.critic_load)), "trainer.critic_load", backend)
    if "hf_checkpoint" not in given.get("model", {}) and "rollout_num_gpus_per_engine" not in given.get("rollout", {}):
        gpus = fewest_gpus(architecture, config.rollout, gpu_bytes)
        if gpus is not None:
            notes.append(f"no run's config: the engine is planned on {gpus} GPU{'s' if gpus > 1 else ''}, the fewest that hold the model")
            config = config.with_fields(rollout={"rollout_num_gpus_per_engine": gpus})
    config, engines = filled(config, 0, 0, trains=True)
    models = dict[str, Architecture]()
    for name, model in config.rollout.models.items():
        try:
            alone = _downloaded(config.with_fields(rollout={"models": {name: model}}), FROZEN)
            config = config.with_fields(rollout={"models": config.rollout.models | alone.rollout.models})
            models[name] = _read_shape(config.of_engines(name).model.hf_checkpoint, f"rollout.models.{name}.hf_checkpoint")
        except ConfigError as error:  # engines serve families that no trainer has
            notes.append(f"{name} is left out of the plan: {error}")
    plan = RunPlan(config, architecture, gpu_bytes, own, models)
    trainer, tokens = run_plan.settled_tokens(plan)
    plan = replace(plan, config=config.model_copy(update={"trainer": trainer}))
    return PlannedConfig(plan, [*notes, *filter(None, [engines, tokens])])


def _read(source: Source) -> tuple[RunConfig, dict[str, Any], list[str]]:
    """Returns the config with what a plan does not need, what of it was given, and the notes about that."""
    layers = Layers()
    if source.path is not None:
        layers.read(source.path)
    layers.lay(source.given.overrides, Path())
    given = {section: fields for section, fields in layers.values.items() if isinstance(fields, dict)}
    drawn = given.get("data", {}).get("data_source") or given.get("curriculum", {}).get("reasoning_gym")
    known = {*(name for fields in given.values() for name in fields), *(["prompt_data"] if drawn else [])}
    lacking = {section: {name: value for name, value in fields.items() if name not in known} for section, fields in STANDINS.items()}
    reading = read(source.path, over(lacking, source.given.overrides))
    raise_problems(reading.problems)
    assert reading.config is not None  # or there was a problem
    return reading.config, given, [*source.given.notes, *reading.notes]


def _shape(config: RunConfig, given: dict[str, Any], notes: list[str]) -> tuple[RunConfig, Architecture]:
    """Returns the policy's shape, from its config.json, or, where that cannot be had, as Megatron's flags describe it; and the config with
    the model's directory."""
    described, backend = described_shape(config.trainer.megatron), config.trainer.trainer_backend
    if "hf_checkpoint" not in given.get("model", {}):
        if described is None:
            expected = "a directory that holds config.json, a name on the hub, or a base that describes a model (docs/models.md)"
            raise ConfigError("model.hf_checkpoint", None, expected)
        return config, with_drafts(replace(described, draft_layers=config.trainer.mtp_num_layers or 0), config.trainer)
    try:
        config = _downloaded(config, "model.hf_checkpoint")
        outline = _read_shape(config.model.hf_checkpoint, "model.hf_checkpoint", backend)
        return config, with_drafts(Inspection(config).as_planned(outline), config.trainer)
    except ConfigError as error:
        if described is None or (config.model.hf_checkpoint / "config.json").is_file():
            raise
        notes.append(f"the shape is what [trainer.megatron] describes, for no config.json could be read: {error}")
        return config, with_drafts(described, config.trainer)


def _downloaded(config: RunConfig, field: str) -> RunConfig:
    """Returns the config with a directory where the field names a model on the hub: config and tokenizer, without weights."""
    return hub_resolve.local(hub_resolve.pinned(config, fields=[field]), [field], weights=False)


def _read_shape(directory: Path, field: str, backend: str = "megatron") -> Architecture:
    try:
        return read_architecture(directory, quantized=True, backend=backend)
    except ConfigError as error:
        if error.field != "model.hf_checkpoint":
            raise
        raise ConfigError(field, str(directory), error.expected) from error


DEFAULT_GB = 80.0
_ABOUT = """The memory that a config needs of each GPU of the trainer and of the engines, from its layout and the model's shape alone.

Needs no GPU and no weights, only the model's config.json; of a model on the hub, config and tokenizer are downloaded. CONFIG may also be a
ready config of a model (configs/models/), whose flags describe the shape. Where something does not fit it says which part is too large
and which flags would lower it, each planned in turn. Exits 1 where it does not fit."""


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    with_flags(command, _ABOUT, "CONFIG [--gpu-memory GB] [--json]", _run)
    command.add_argument("config", metavar="CONFIG", type=Path, help="a run's TOML file, or a model's")
    memory = f"memory of a GPU, in GB of 10^9 bytes; default: that of this machine's smallest GPU, {DEFAULT_GB:g} without one"
    command.add_argument("--gpu-memory", type=positive, metavar="GB", help=memory)
    add_json(command)


def _run(parsed: argparse.Namespace, console: Console) -> int:
    gpu_bytes = devices.gpu_bytes() or int(DEFAULT_GB * 1e9) if parsed.gpu_memory is None else int(parsed.gpu_memory * 1e9)
    found = planned(Source.of(parsed.config, parsed.flags), gpu_bytes)
    plan = found.plan
    if parsed.json:
        console.file.write(json_text(run_plan.as_json(plan, found.notes)) + "\n")
        return exit_codes.DONE if plan.fits else exit_codes.FAILED
    size = f"{total_parameters(plan.architecture) / 1e9:.2f} billion parameters"
    console.print(Text(f"{size}, GPUs of {gpu_bytes / 1e9:.1f} GB; all figures in GB of 10^9 bytes"), soft_wrap=True)
    for table in (run_plan.trainer_table(plan), run_plan.engine_table(plan)):
        if table is not None:
            console.print()
            console.print(table)
    console.print(Text(f"\n{run_plan.LEGEND}"), soft_wrap=True)
    for note in found.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    for line in run_plan.verdicts(plan):
        console.print(Text(line, style="" if line.startswith(" ") else "bold red"), soft_wrap=True)
    console.print("It fits." if plan.fits else "It does not fit.")
    return exit_codes.DONE if plan.fits else exit_codes.FAILED
