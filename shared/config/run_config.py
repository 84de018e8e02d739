"""The run's config: a TOML file over its bases (`shared.config.config_layers`), pydantic sections, unknown keys refused with the nearest
one.

Field names are the flags' names (slime's, and Megatron's where the trainer has them) with underscores; each is unique over all
sections, so that every field is also a flag (`shared.config.flags`). The resolved config is frozen in the bus when the run is created;
services read it from there.
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from shared.config import megatron_flags, presets, slime_flags, slime_functions
from shared.config.algorithm import AlgorithmSection
from shared.config.bus_section import BusSection
from shared.config.config_layers import Known, Layers, in_file
from shared.config.data_section import DataSection
from shared.config.debug_section import DebugSection
from shared.config.environment_variables import names_credential
from shared.config.eval_config_file import read_sets
from shared.config.eval_section import EvalSection
from shared.config.model_section import ModelSection
from shared.config.monitoring_section import MonitoringSection
from shared.config.reward_section import CUSTOM, RewardSection
from shared.config.rollout_section import RolloutSection
from shared.config.run_section import RunSection
from shared.config.section import Misfits, Section
from shared.config.sft_section import SftSection
from shared.config.store_section import StoreSection
from shared.config.trainer_section import TrainerSection
from shared.config.weights_section import WeightsSection
from shared.data import data_files
from shared.hub import hub_names
from shared.runtime.errors import BadInput, ConfigError, nearest, problems_of, raise_problems
from shared.schema.overlong import NO_LIMIT

MODEL_FIELDS = ("hf_checkpoint", "critic_load")
"""Fields that hold the path of a model, or its name on the hub."""


class RunConfig(Section):
    """The whole config of a run, section by section."""

    run: RunSection
    model: ModelSection
    data: DataSection = DataSection()
    rollout: RolloutSection
    reward: RewardSection = RewardSection()
    eval: EvalSection = EvalSection()
    trainer: TrainerSection = TrainerSection()
    sft: SftSection = SftSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    weights: WeightsSection = WeightsSection()
    monitoring: MonitoringSection = MonitoringSection()
    debug: DebugSection = DebugSection()
    bus: BusSection = BusSection()
    store: StoreSection = StoreSection()

    def _complete(self) -> None:
        trainer, samples = self.trainer, self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt
        size = trainer.global_batch_size
        if size is not None and "num_steps_per_rollout" not in trainer.model_fields_set and samples % size == 0:
            trainer.num_steps_per_rollout = samples // size

    @property
    def has_steps(self) -> bool:
        """Returns whether there is anything to train but the warm start."""
        return bool(self.rollout.num_rollout or self.rollout.num_epoch)

    def _misfits(self) -> Iterator[str]:
        yield from self._work()
        yield from self._sizes()
        yield from self._shared_gpus()
        yield from self._rewards_of_sets()

    def _work(self) -> Iterator[str]:
        """Yields what the run lacks for what it is to do."""
        if not self.has_steps:
            if not self.eval.named and self.sft.sft_data is None:
                yield "rollout.num_rollout: 0, with neither prompts to evaluate on (eval_prompt_data) nor demonstrations (sft_data)"
            return
        if self.data.prompt_data is None and self.data.data_source is None:
            yield f"data.prompt_data: required: {type(self.data).model_fields['prompt_data'].description}"
        if self.debug.debug_train_only and not self.debug.load_debug_rollout_data:
            yield "debug.debug_train_only: load_debug_rollout_data, the files of the batches to train; or num_rollout = 0 with sft_data"

    def _sizes(self) -> Iterator[str]:
        """Yields the sizes that contradict each other, each as ``section.field: what is wrong``."""
        ranks, trainer = self.trainer.ranks("actor"), self.trainer
        sizes = trainer.tensor_model_parallel_size, trainer.pipeline_model_parallel_size, trainer.context_parallel_size
        replica = math.prod(sizes)
        if ranks % replica:
            field, product = "trainer.tensor_model_parallel_size", str(replica)
            if replica != sizes[0]:
                field += " x pipeline_model_parallel_size x context_parallel_size"
                product = " x ".join(map(str, sizes)) + f" = {replica}"
            yield f"{field}: {product} does not divide the {ranks} trainer ranks"
        groups, n, steps = self.rollout.rollout_batch_size, self.rollout.n_samples_per_prompt, self.trainer.num_steps_per_rollout
        samples, size = groups * n, self.trainer.global_batch_size
        if size is not None and samples != size * steps:
            yield (
                f"trainer.global_batch_size: rollout_batch_size x n_samples_per_prompt = {groups} x {n} = {samples} samples are not "
                f"global_batch_size x num_steps_per_rollout = {size} x {steps} = {size * steps}"
            )
        if ranks % replica == 0 and samples % (steps * (ranks // replica)):
            yield (
                f"trainer.num_steps_per_rollout: rollout_batch_size x n_samples_per_prompt = {samples} samples do not divide "
                f"into {steps} optimizer steps over {ranks // replica} data-parallel ranks"
            )
        if self.has_steps and self.algorithm.needs_groups and n < 2 and not self.debug.debug_rollout_only:
            yield f"rollout.n_samples_per_prompt: {self.algorithm.advantage_estimator} compares the samples of a group; use at least 2"

    def _shared_gpus(self) -> Iterator[str]:
        """Yields the settings of colocated services that contradict each other."""
        trainer, rollout = self.trainer, self.rollout
        if not trainer.colocate:
            for field in ("offload_train", "offload_rollout"):
                if getattr(trainer, field):
                    yield f"trainer.{field}: belongs to colocate = true: only what shares a GPU has to make room on it"
            return
        if "auto" not in (trainer.train_device, rollout.rollout_device) and trainer.train_device != rollout.rollout_device:
            yield (
                f"rollout.rollout_device: {rollout.rollout_device}, but train_device is {trainer.train_device}; colocated services "
                "compute on the same devices"
            )
        if self.weights.update_weight_transport == "disk":
            yield "weights.update_weight_transport: disk, but colocated engines share the trainer's memory; leave it at nccl"
        if self.weights.join_from in ("peer", "disk"):
            yield (
                f"weights.join_from: {self.weights.join_from}, but colocated engines get all weights from the trainer, once it has "
                "trained; use auto or trainer"
            )
        engines, ranks = rollout.rollout_replicas * rollout.rollout_num_gpus_per_engine, trainer.ranks("actor")
        if engines > ranks:
            yield (
                f"rollout.rollout_replicas: {rollout.rollout_replicas} engines of {rollout.rollout_num_gpus_per_engine} GPUs do not fit on "
                f"the trainer's {ranks} (actor_num_nodes x actor_num_gpus_per_node), which colocate makes them share"
            )

    def _rewards_of_sets(self) -> Iterator[str]:
        """Yields the rewards of evaluation sets that the run does not have."""
        for field, item in self.eval.named.items():
            if item.rm_type is None or item.custom_rm_path is not None:
                continue
            try:
                RewardSection.model_validate(self.reward.model_copy(update={"rm_type": item.rm_type}).model_dump())
            except ValidationError as error:
                reason = error.errors()[0].get("ctx", {}).get("error")
                yield from (f"{field}.{problem.removeprefix('reward.')}" for problem in getattr(reason, "problems", []))

    @property
    def longest_sample(self) -> int:
        """Returns the most tokens of a sample that is trained."""
        return NO_LIMIT if self.rollout.overlong_samples == "alone" else self.trainer.micro_batch_tokens

    @property
    def trained(self) -> Path:
        """Returns the directory of all that the trainer writes, which nobody else need be able to write."""
        return self.run.root if self.trainer.save is None else self.trainer.save / self.run.name

    def absolute(self, base: Path) -> "RunConfig":
        """Returns the config with every path absolute, relative ones resolved from ``base``; other models become names on the hub."""
        resolved = {}
        for section in type(self).model_fields:
            value: Section = getattr(self, section)
            paths = {
                field: hub_names.model_path(item, base) if field in MODEL_FIELDS and item is not None else data_files.absolute(item, base)
                for field, item in value
            }
            # fields that stay as they are must not count as given
            resolved[section] = value.model_copy(update={field: path for field, path in paths.items() if path is not getattr(value, field)})
        absolute = self.model_copy(update=resolved)
        return absolute.model_copy(update={"eval": absolute.eval.absolute(base)})

    def queues(self) -> list[str]:
        """Returns the queues of the environments that prompts of this run may name, those of its evaluation sets among them."""
        custom = {CUSTOM for item in self.eval.named.values() if item.custom_rm_path is not None}
        return sorted({*self.reward.queues(), *custom})


class ConfigReading(NamedTuple):
    """A config as it was read.

    Args:
        config: None where a value is wrong; it is there if the only errors are unknown sections, keys and flags. problems: a ConfigError
            for each error. notes: lines for the user, of keys under other names or without effect.
    """

    config: RunConfig | None
    problems: list[BadInput]
    notes: list[str]


def parse(values: dict[str, Any]) -> RunConfig:
    """Builds the config from nested plain values. Raises ConfigError with field, value and what is expected, or Problems of several."""
    known, problems, _ = _known(values)
    known, preset = _with_presets(known)
    try:
        config = _with_own_gpus(_without_steps(RunConfig.model_validate(known)))
    except ValidationError as error:
        problems += _without_consequences(_config_errors(error, {**values, **known}), problems)
        problems += _misfits_of_others(known, error, values)
    raise_problems([_of_preset(problem, preset) for problem in problems])
    return config


def _without_steps(config: RunConfig) -> RunConfig:
    """Returns the config of a run without training steps as that half of a run which it needs: engines to evaluate, or a trainer for the
    warm start; both where the warm start's weights are evaluated."""
    if config.has_steps or config.debug.trains_only:
        return config
    half = {"debug_rollout_only": True} if config.sft.sft_data is None else {} if config.eval.named else {"debug_train_only": True}
    trainer = config.trainer.model_copy(update={"lr_decay_style": "constant"})  # over no steps nothing decays
    rollout = config.rollout.model_copy(update={"rollout_function_path": None})  # nothing is drawn, but it may be what evaluates
    evaluates = (config.eval.eval_function_path or config.rollout.rollout_function_path) if config.eval.named else None
    changed = {"trainer": trainer, "rollout": rollout, "eval": config.eval.model_copy(update={"eval_function_path": evaluates})}
    return config.model_copy(update={"debug": config.debug.model_copy(update=half), **changed})


def _with_own_gpus(config: RunConfig) -> RunConfig:
    """Returns the config of one half of a run without colocation: it has nobody to share its GPUs with."""
    if not (config.debug.debug_rollout_only or config.debug.trains_only):
        return config
    alone = {"colocate": False, "offload_train": None, "offload_rollout": None}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=alone)})


def _with_presets(known: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the values with those of the presets that they name; and of each field that was set so the names of the presets."""
    try:
        named = [str(name) for name in presets.listed(known.get("algorithm", {}).get("preset", []))]
    except ValueError:  # the field's own check tells it
        named = []
    owners = field_sections()
    given = {field: value for fields in known.values() for field, value in fields.items()}
    defaults = {field: section_model(section).model_fields[field].default for field, section in owners.items()}
    found = presets.fields_of(named, given, defaults)
    for field, value in found.items():
        known = {**known, owners[field]: {**known.get(owners[field], {}), field: value}}
    return known, {f"{owners[field]}.{field}": ", ".join(named) for field in found}


def _of_preset(problem: BadInput, preset: dict[str, str]) -> BadInput:
    """Returns the same problem with the preset that set the field."""
    if not isinstance(problem, ConfigError) or problem.field not in preset:
        return problem
    return ConfigError(problem.field, problem.value, f"{problem.expected} (set by preset {preset[problem.field]})")


def _misfits_of_others(known: dict[str, Any], refused: ValidationError, values: dict[str, Any]) -> list[BadInput]:
    """Returns the contradictions among the valid fields: pydantic checks for them only once all fields are valid."""
    if not any(error["loc"] for error in refused.errors()):
        return []  # all sections were valid, and what does not go together over them was refused
    fields = {tuple(problem.field.split(".")[:2]) for problem in _config_errors(refused, values)}
    others = {section: {name: value for name, value in given.items() if (section, name) not in fields} for section, given in known.items()}
    try:
        RunConfig.model_validate(others)
    except ValidationError as error:
        if isinstance(error.errors()[0].get("ctx", {}).get("error"), Misfits):
            found = _config_errors(error, values)
            return [problem for problem in found if not any(path[-1] in str(problem) for path in fields)]
    return []


def load(path: Path, overrides: dict[str, dict[str, Any]] | None = None) -> RunConfig:
    """Returns the config of `read`. Raises ConfigError for an error in it, or Problems of several."""
    config, problems, _ = read(path, overrides)
    raise_problems(problems)
    assert config is not None  # or there was a problem
    return config


COMMAND_LINE = Path("the command line")
"""The origin of values in no file."""


def read(path: Path | None, overrides: dict[str, dict[str, Any]] | None = None) -> ConfigReading:
    """Reads a TOML file over its bases, applies ``overrides`` (section → field → value), makes paths absolute from here.

    ``path``: None: the overrides are all there is. Raises ConfigError for a file that cannot be read.
    """
    layers, origin = Layers(_known), path or COMMAND_LINE
    if path is not None:
        layers.read(path)
    layers.lay(overrides or {}, origin)
    _lay_custom_config(layers)
    layers.notes += slime_functions.settle(layers.values)
    problems = layers.problems
    try:
        _read_eval_config(layers)
        return ConfigReading(parse(layers.values).absolute(Path.cwd()), problems, layers.notes)
    except BadInput as error:
        found = _without_consequences(problems_of(error), problems)
        return ConfigReading(None, problems + [_with_origin(problem, layers, origin) for problem in found], layers.notes)


def _lay_custom_config(layers: Layers) -> None:
    """Lays the YAML file of ``custom_config_path`` over the values: fields into their sections, the rest into ``custom_args``."""
    run = layers.values.get("run")
    if not isinstance(run, dict) or run.get("custom_config_path") is None:
        return
    path = Path(str(run["custom_config_path"]))
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else f"not a readable YAML file: {' '.join(str(error).split())}"
        layers.problems.append(ConfigError("run.custom_config_path", str(path), reason))
        return
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        layers.problems.append(ConfigError("run.custom_config_path", str(path), "a mapping: field = value"))
        return
    owners, own, sections = field_sections(), dict[str, Any](), dict[str, dict[str, Any]]()
    for name, value in values.items():
        if name in owners and name != "custom_config_path":
            sections.setdefault(owners[name], {})[name] = value
        else:
            own[name] = value
    layers.lay({**sections, "run": {**sections.get("run", {}), "custom_args": own}}, path)
    if sections:
        shown = ", ".join(name for fields in sections.values() for name in fields)
        layers.notes.append(f"{path} stands over what is given elsewhere: {shown}")


def _read_eval_config(layers: Layers) -> None:
    """Puts the sets of slime's ``eval_config``, where one is given, in the place of those that ``[eval]`` names. Raises ConfigError."""
    values = layers.values.get("eval")
    if not isinstance(values, dict) or (given := values.get("eval_config")) is None:
        return
    sets = read_sets(Path(str(given)))
    if values.get("sets"):
        raise ConfigError("eval.sets", f"{len(values['sets'])} sets", f"given besides eval_config = {given}; leave one of them out")
    if values.get("eval_prompt_data") is not None:
        layers.notes.append(f"eval.eval_prompt_data: eval_config = {given} takes its place, as with slime")
    values.update(sets=sets, eval_config=None, eval_prompt_data=None)


def _without_consequences(found: Iterable[BadInput], reported: list[BadInput]) -> list[BadInput]:
    """Returns the errors that do not follow from a reported one: a misspelt field, or a section that is no table, is also missing."""
    refused = [problem for problem in reported if isinstance(problem, ConfigError)]
    fields, hints = {problem.field for problem in refused}, {problem.expected.rpartition("did you mean ")[2] for problem in refused}

    def follows(problem: BadInput) -> bool:
        if not isinstance(problem, ConfigError):
            return False
        section, _, name = problem.field.rpartition(".")
        return problem.field in fields or section in fields or f"{name}?" in hints

    return [problem for problem in found if not follows(problem)]


def _with_origin(problem: BadInput, layers: Layers, path: Path) -> BadInput:
    """Returns the problem with the file that it comes from, if that is a base of the config at ``path``."""
    origin = layers.origins.get(".".join(problem.field.split(".")[:2]), path) if isinstance(problem, ConfigError) else path
    return problem if origin == path else in_file(problem, origin)


def section_model(section: str) -> type[Section]:
    """Returns the class of a section."""
    model = RunConfig.model_fields[section].annotation
    assert isinstance(model, type) and issubclass(model, Section)
    return model


def field_sections() -> dict[str, str]:
    """Returns the section of every field. The names of fields are unique over all sections (a test holds that)."""
    return {field: section for section in RunConfig.model_fields for field in section_model(section).model_fields}


def changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Returns the fields that differ and may not change on resume, as ``section.field: old → new``."""
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
    """Returns a value as errors show it: with URLs stripped of credentials, and without what is named as one."""
    if isinstance(value, dict):
        return {key: "…" if names_credential(str(key)) else _without_secrets(item) for key, item in value.items()}
    return re.sub(r"://.*@", "://", value) if isinstance(value, str) else value


def _known(values: dict[str, Any]) -> Known:
    """Returns the values of known fields, Megatron's flags under their names, the errors of the others, and lines for the user."""
    known, problems, notes = _known_fields(values)
    trainer = known.get("trainer", {})
    if isinstance(trainer, dict) and isinstance(trainer.get("megatron"), dict):
        try:
            known = {**known, "trainer": {**trainer, "megatron": megatron_flags.canonical(trainer["megatron"], field_sections())}}
        except ConfigError as error:
            problems.append(error)
            known = {**known, "trainer": {key: value for key, value in trainer.items() if key != "megatron"}}
    return Known(known, problems, notes)


def _translated(values: dict[str, Any]) -> Known:
    """Returns the values with slime's keys, which are no fields, as the fields that they stand for; they stand in any section."""
    owners = field_sections()
    known: dict[str, Any] = {}
    found = Known({}, [], [])
    for section, fields in values.items():
        known[section] = fields
        if not isinstance(fields, dict):
            continue
        known[section] = {**fields}
        megatron = fields.get("megatron")
        tables = [(section, known[section])]
        if section == "trainer" and isinstance(megatron, dict):
            known[section]["megatron"] = {**megatron}
            tables.append(("trainer.megatron", known[section]["megatron"]))
        for path, table in tables:
            for key in list(table):
                name = key.replace("-", "_")
                if name not in owners and (entry := slime_flags.find(name)) is not None:
                    _translate(f"{path}.{key}", name, entry, table.pop(key), found)
    for name, value in found.values.items():
        section = known.setdefault(owners[name], {})
        if isinstance(section, dict):
            section.setdefault(name, value)
    return Known(known, found.problems, found.notes)


def _translate(path: str, name: str, entry: slime_flags.Entry, value: Any, found: Known) -> None:
    """Adds to ``found`` what one of slime's keys comes to."""
    try:
        translation = slime_flags.translate(name, entry, value)
        if translation.environment:
            raise ValueError(f"a config holds no secrets; set {', '.join(translation.environment)} in the environment")
    except ValueError as error:
        found.problems.append(ConfigError(path, value, str(error)))
        return
    merged = translation.over(found.values)
    found.values.update(merged)
    found.notes.extend(note for note in translation.notes if note not in found.notes)


def _known_fields(given: dict[str, Any]) -> Known:
    """Returns the known fields, a ConfigError for each unknown section and key, and lines for the user."""
    names, owners = list(RunConfig.model_fields), field_sections()
    known: dict[str, Any] = {}
    values, problems, notes = _translated(given)
    for section, fields in values.items():
        if section not in names:
            elsewhere = f"belongs into the section [{owners[section]}]" if section in owners else None
            shown = "…" if isinstance(fields, dict) and elsewhere is None else fields
            problems.append(ConfigError(section, shown, elsewhere or f"unknown section; {nearest(section, names)}"))
        elif not isinstance(fields, dict):
            problems.append(ConfigError(section, fields, f"expected a section [{section}] with fields"))
        else:
            valid = list(section_model(section).model_fields)
            known[section] = {field: value for field, value in fields.items() if field in valid}
            for field in (field for field in fields if field not in valid):
                advice = megatron_flags.refusal(field) or f"unknown key; {nearest(field, valid)}"
                expected = f"unknown key here; it belongs into the section [{owners[field]}]" if field in owners else advice
                problems.append(ConfigError(f"{section}.{field}", fields[field], expected))
    return Known(known, problems, notes)


def _config_errors(error: ValidationError, values: dict[str, Any]) -> Iterator[ConfigError]:
    """Yields an error for each value that pydantic refused, under its field."""
    for found in error.errors():
        reason = found.get("ctx", {}).get("error")
        if isinstance(reason, Misfits):
            for problem in reason.problems:
                field, message = problem.split(": ", 1)
                yield _config_error(found["type"], field.split("."), message, values)
        else:
            yield _config_error(found["type"], [str(part) for part in found["loc"]], found["msg"].removeprefix("Value error, "), values)


def _config_error(kind: str, location: list[str], message: str, values: dict[str, Any]) -> ConfigError:
    value: Any = values
    for part in location:
        if isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            value = value.get(part) if isinstance(value, dict) else None
    if kind == "missing":
        model = section_model(location[0]) if len(location) > 1 else None
        description = model.model_fields[location[1]].description if model and location[1] in model.model_fields else "a section"
        return ConfigError(".".join(location), None, f"required: {description}")
    return ConfigError(".".join(location), _without_secrets(value), message[0].lower() + message[1:])
