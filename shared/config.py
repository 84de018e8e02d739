"""The run's config: a TOML file over its bases (`shared.config_files`), pydantic sections, unknown keys refused with the nearest one.

Field names are the flags' names (slime's, and Megatron's where the trainer has them) with underscores; each is unique over all
sections, so that every field is also a flag (`shared.flags`). The resolved config is frozen in the bus when the run is created;
services read it from there.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError, model_validator

from shared import config_files, data_files, megatron_flags, slime_flags
from shared.algorithm import AlgorithmSection
from shared.errors import ConfigError, nearest
from shared.sections import (
    BusSection,
    DataSection,
    EvalSection,
    ModelSection,
    MonitoringSection,
    RewardSection,
    RolloutSection,
    RunSection,
    Section,
    SftSection,
    StoreSection,
    TrainerSection,
)
from shared.weights.section import WeightsSection


class RunConfig(Section):
    """Everything a run is, section by section."""

    run: RunSection
    model: ModelSection
    data: DataSection
    rollout: RolloutSection
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection = SftSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    weights: WeightsSection = WeightsSection()
    monitoring: MonitoringSection = MonitoringSection()
    bus: BusSection = BusSection()
    store: StoreSection = StoreSection()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        ranks, trainer = self.trainer.actor_num_gpus_per_node, self.trainer
        sizes = trainer.tensor_model_parallel_size, trainer.pipeline_model_parallel_size, trainer.context_parallel_size
        replica = math.prod(sizes)
        if ranks % replica:
            field, product = "trainer.tensor_model_parallel_size", str(replica)
            if replica != sizes[0]:
                field += " x pipeline_model_parallel_size x context_parallel_size"
                product = " x ".join(map(str, sizes)) + f" = {replica}"
            raise ValueError(f"{field}: {product} does not divide the {ranks} trainer ranks")
        groups, n, steps = self.rollout.rollout_batch_size, self.rollout.n_samples_per_prompt, self.trainer.num_steps_per_rollout
        samples, size = groups * n, self.trainer.global_batch_size
        if size is not None and samples != size * steps:
            raise ValueError(
                f"trainer.global_batch_size: rollout_batch_size x n_samples_per_prompt = {groups} x {n} = {samples} samples are not "
                f"global_batch_size x num_steps_per_rollout = {size} x {steps} = {size * steps}"
            )
        if samples % (steps * (ranks // replica)):
            raise ValueError(
                f"trainer.num_steps_per_rollout: rollout_batch_size x n_samples_per_prompt = {samples} samples do not divide "
                f"into {steps} optimizer steps over {ranks // replica} data-parallel ranks"
            )
        self._shares_gpus()
        if self.algorithm.advantage_estimator in ("grpo", "gspo", "cispo") and self.rollout.n_samples_per_prompt < 2:
            raise ValueError(
                f"rollout.n_samples_per_prompt: {self.algorithm.advantage_estimator} compares the samples of a group; use at least 2"
            )
        return self

    def _shares_gpus(self) -> None:
        """Raises ValueError where what is asked of colocated services does not go together."""
        trainer, rollout = self.trainer, self.rollout
        if not trainer.colocate:
            for field in ("offload_train", "offload_rollout"):
                if getattr(trainer, field):
                    raise ValueError(f"trainer.{field}: belongs to colocate = true: only what shares a GPU has to make room on it")
            return
        if "auto" not in (trainer.train_device, rollout.rollout_device) and trainer.train_device != rollout.rollout_device:
            raise ValueError(
                f"rollout.rollout_device: {rollout.rollout_device}, but train_device is {trainer.train_device}; colocated services "
                "compute on the same devices"
            )
        if self.weights.update_weight_transport == "disk":
            raise ValueError("weights.update_weight_transport: disk, but colocated engines share the trainer's memory; leave it at nccl")
        if self.weights.join_from in ("peer", "disk"):
            raise ValueError(
                f"weights.join_from: {self.weights.join_from}, but colocated engines get all weights from the trainer, at the end of its "
                "turn; use auto or trainer"
            )
        engines, ranks = rollout.rollout_replicas * rollout.rollout_num_gpus_per_engine, trainer.actor_num_gpus_per_node
        if engines > ranks:
            raise ValueError(
                f"rollout.rollout_replicas: {rollout.rollout_replicas} engines of {rollout.rollout_num_gpus_per_engine} GPUs do not fit on "
                f"the trainer's {ranks} (actor_num_gpus_per_node), which colocate makes them share"
            )

    def check_paths(self) -> None:
        """Refuses paths that do not exist. Raises ConfigError naming the field."""
        model = self.model.hf_checkpoint
        if not model.is_dir():
            raise ConfigError("model.hf_checkpoint", str(model), "no such directory; give one with config.json and *.safetensors")
        for name in ("config.json", "tokenizer.json"):
            if not (model / name).is_file():
                raise ConfigError("model.hf_checkpoint", str(model), f"the directory holds no {name}")
        files = {
            "data.prompt_data": self.data.prompt_data,
            "eval.eval_prompt_data": self.eval.eval_prompt_data,
            "sft.sft_data": self.sft.sft_data,
        }
        for field, value in files.items():
            for path in data_files.paths(value):
                if not path.is_file():
                    expected = "JSONL file" if field == "sft.sft_data" else "JSONL or Parquet file"
                    raise ConfigError(field, str(path), f"no such file; give a {expected}")

    def absolute(self, base: Path) -> RunConfig:
        """The same config with every path absolute, relative ones taken from ``base``."""
        sections = {}
        for section in type(self).model_fields:
            value: Section = getattr(self, section)
            paths = {field: data_files.absolute(item, base) for field, item in value}
            sections[section] = value.model_copy(update=paths)
        return self.model_copy(update=sections)


def parse(values: dict[str, Any]) -> RunConfig:
    """Builds the config from nested plain values. Raises ConfigError: field, value, and what would be right."""
    values = _checked(values)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise _config_error(error, values) from None


def load(path: Path, overrides: dict[str, dict[str, Any]] | None = None) -> RunConfig:
    """Reads a TOML file over its bases, lays ``overrides`` (section → field → value) over it, makes paths absolute from here.

    Raises ConfigError.
    """
    layers = config_files.read(path, _checked)
    values = layers.values
    for section, fields in (overrides or {}).items():
        existing = values.setdefault(section, {})
        if not isinstance(existing, dict):
            continue  # `parse` refuses it
        for field, value in fields.items():
            layers.origins.pop(f"{section}.{field}", None)
            if isinstance(value, dict) and isinstance(existing.get(field), dict):
                existing[field].update(value)
            else:
                existing[field] = value
    try:
        return parse(values).absolute(Path.cwd())
    except ConfigError as error:
        origin = layers.origins.get(".".join(error.field.split(".")[:2]), path)
        if origin == path:
            raise
        raise ConfigError(error.field, error.value, f"{error.expected} (in {origin})") from None


def field_sections() -> dict[str, str]:
    """Every field's name → its section. Names are unique over sections (a test holds that)."""
    owners: dict[str, str] = {}
    for section, info in RunConfig.model_fields.items():
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, Section)
        for field in model.model_fields:
            owners.setdefault(field, section)
    return owners


def section_model(section: str) -> type[Section]:
    """The model class of a section."""
    model = RunConfig.model_fields[section].annotation
    assert isinstance(model, type) and issubclass(model, Section)
    return model


def changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Fields that differ and may not change on resume, as ``section.field: old → new``."""
    found = []
    for section in RunConfig.model_fields:
        before, after = getattr(old, section), getattr(new, section)
        for field, info in section_model(section).model_fields.items():
            extra = info.json_schema_extra
            if isinstance(extra, dict) and extra.get("mutable"):
                continue
            if getattr(before, field) != getattr(after, field):
                found.append(f"{section}.{field}: {getattr(before, field)!r} → {getattr(after, field)!r}")
    return found


def _without_secrets(value: Any) -> Any:
    """A value as errors show it: URLs without their credentials."""
    if isinstance(value, dict):
        return {key: _without_secrets(item) for key, item in value.items()}
    return re.sub(r"://.*@", "://", value) if isinstance(value, str) else value


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    """The same, Megatron's flags under their names. Raises ConfigError for sections, keys and flags that there are not."""
    _refuse_unknown(values)
    trainer = values.get("trainer", {})
    if not isinstance(trainer.get("megatron"), dict):
        return values
    return {**values, "trainer": {**trainer, "megatron": megatron_flags.canonical(trainer["megatron"], field_sections())}}


def _refuse_unknown(values: dict[str, Any]) -> None:
    sections = list(RunConfig.model_fields)
    owners = field_sections()
    for section, fields in values.items():
        if section not in sections:
            if section in owners:
                raise ConfigError(section, fields, f"belongs into the section [{owners[section]}]")
            raise ConfigError(section, "…" if isinstance(fields, dict) else fields, f"unknown section; {nearest(section, sections)}")
        if not isinstance(fields, dict):
            raise ConfigError(section, fields, f"expected a section [{section}] with fields")
        valid = list(section_model(section).model_fields)
        for field, value in fields.items():
            if field in valid:
                continue
            if field in owners:
                raise ConfigError(f"{section}.{field}", value, f"unknown key here; it belongs into the section [{owners[field]}]")
            raise ConfigError(f"{section}.{field}", value, slime_flags.advice(field) or f"unknown key; {nearest(field, valid)}")


def _config_error(error: ValidationError, values: dict[str, Any]) -> ConfigError:
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    location = [str(part) for part in first["loc"]]
    if first["type"] == "value_error" and ": " in message:  # a validator over several fields names its own
        field, message = message.split(": ", 1)
        location = field.split(".")
    value: Any = values
    for part in location:
        value = value.get(part) if isinstance(value, dict) else None
    if first["type"] == "missing":
        model = section_model(location[0]) if len(location) > 1 else None
        description = model.model_fields[location[1]].description if model and location[1] in model.model_fields else "a section"
        return ConfigError(".".join(location), None, f"required: {description}")
    return ConfigError(".".join(location), _without_secrets(value), message[0].lower() + message[1:])
