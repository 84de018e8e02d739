"""Everything that can be wrong with a run's input, found before anything is started, all of it at once.

A *check* takes an `Inspection` and yields ConfigErrors (the field, what was given, what would be right) and `Note`s, which are printed
where nothing is refused. It may also raise a ConfigError, which then is its last. Checks are independent: each leaves out what it cannot
read because of something that another check reports. A new one is a function in a module of this package, named after what it checks, and
stands in the table below. None needs a GPU; all together take seconds.
"""

import enum
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from myxo.launch import service_plan
from myxo.preflight import data_checks, engine_checks, machine_checks, model_checks, objective_checks, run_plan
from myxo.preflight.inspection import Findings, Inspection, Note
from myxo.run import run_access
from shared.config import devices, flags, slime_defaults
from shared.config.config_reading import fields_named, read, refusals_of, without
from shared.config.flags import CommandLine
from shared.config.run_config import RunConfig
from shared.hub import hub_names, hub_resolve
from shared.hub.hub_client import Hub
from shared.runtime.errors import BadInput, problems_of, raise_problems
from shared.runtime.safe_text import printable_line, say

Check = Callable[[Inspection], Findings]

Settled = tuple[Inspection, str, list[BadInput]]
Starts = bool | Callable[[RunConfig], bool]  # whether all services start on this machine, or what says that of a config

LONGEST_NOTE = 1000  # characters of a note that are shown: one may hold a whole prompt


class When(enum.Flag):
    """The runs that a check is for: all, those whose services start on this machine, those that train, those that generate."""

    ALWAYS = 0
    STARTS, TRAINS, GENERATES = enum.auto(), enum.auto(), enum.auto()


ALWAYS, STARTS, TRAINS, GENERATES = When.ALWAYS, When.STARTS, When.TRAINS, When.GENERATES

# All checks, in their order.
CHECKS: dict[Check, When] = {
    objective_checks.check_support: ALWAYS,
    model_checks.check_files: ALWAYS,
    model_checks.check_tokenizer: ALWAYS,
    data_checks.check_files: ALWAYS,
    data_checks.check_generators: ALWAYS,
    machine_checks.check_extras: ALWAYS,
    model_checks.check_actor: ALWAYS,
    model_checks.check_other_models: TRAINS,
    model_checks.check_megatron_flags: TRAINS,
    model_checks.check_layout_reach: ALWAYS,
    model_checks.check_given_checkpoints: ALWAYS,
    model_checks.check_quantization: ALWAYS,
    model_checks.check_awareness: TRAINS,
    model_checks.check_ranks: TRAINS,
    model_checks.check_described_shape: ALWAYS,
    model_checks.check_engines: GENERATES,
    model_checks.check_training: TRAINS,
    model_checks.check_engine_flags: GENERATES,
    engine_checks.check_engine_model: GENERATES,
    engine_checks.check_models: GENERATES,
    model_checks.check_engine_backend: STARTS | GENERATES,
    model_checks.check_engine_context: GENERATES,
    machine_checks.check_functions: ALWAYS,
    machine_checks.check_credentials: ALWAYS,
    objective_checks.check_dumps: ALWAYS,
    objective_checks.check_needs: ALWAYS,
    objective_checks.check_intervals: ALWAYS,
    objective_checks.check_presets: ALWAYS,
    objective_checks.check_variables: ALWAYS,
    objective_checks.check_teachers: ALWAYS,
    machine_checks.check_packages: STARTS,
    machine_checks.check_traces: STARTS,
    machine_checks.check_servers: STARTS,
    machine_checks.check_rewards: STARTS,
    machine_checks.check_commands: STARTS,
    machine_checks.check_gateways: STARTS,
    machine_checks.check_ingest: STARTS,
    machine_checks.check_object_store: STARTS | TRAINS,
    machine_checks.check_sandbox: STARTS,
    engine_checks.check_external_engines: STARTS | GENERATES,
    engine_checks.check_engine_packages: STARTS,
    engine_checks.check_trainer_packages: STARTS,
    machine_checks.check_gpus: STARTS,
    machine_checks.check_profilers: STARTS | TRAINS,
    machine_checks.check_earlier_run: STARTS,
    machine_checks.check_directories: STARTS,
    machine_checks.check_disk: STARTS,
    machine_checks.check_memory: STARTS,
    run_plan.check_gpu_memory: STARTS,
    machine_checks.check_limits: STARTS,
    # these read rows, which takes longest; the last ones need what the first have read
    data_checks.check_training_prompts: GENERATES,
    data_checks.check_heldout_prompts: GENERATES,
    data_checks.check_demonstrations: TRAINS,
    data_checks.check_contents: GENERATES,
    data_checks.check_dates: ALWAYS,
    data_checks.check_labels: GENERATES,
    engine_checks.check_lengths: GENERATES,
    objective_checks.check_values: ALWAYS,
}


class Source(NamedTuple):
    """Where a config comes from. ``path``: its TOML file, None: there is none. ``given``: the flags over it, or the whole of it."""

    path: Path | None
    given: CommandLine

    @classmethod
    def of(cls, path: Path, arguments: list[str]) -> "Source":
        """Returns a file with flags over it."""
        return cls(path, flags.read(arguments))


def checked_config(source: Source, *, starts: Starts = False, fresh: bool = False, cluster: tuple[int, int] | None = None) -> RunConfig:
    """Returns the config of `checked` as the run keeps it. Raises as it does."""
    config = checked(source, starts=starts, fresh=fresh, cluster=cluster).frozen
    assert config is not None  # it passed
    return config


def checked(source: Source, *, starts: Starts = False, fresh: bool = False, cluster: tuple[int, int] | None = None) -> Inspection:
    """Returns the inspection of a config with its flags (of `shared.config.flags`) laid over it, which has passed all checks; its names on
    the hub are pinned, and their files on this machine.

    ``source``: where it comes from. ``starts``: whether this is the machine that all services start on. ``fresh``: whether what the run has
    done so far is to be removed. ``cluster``: nodes, and GPUs of each, that the run has to itself; default: this machine where it starts
    here. Raises ConfigError, or Problems of several.
    """
    path, given = source
    problems, inspection = list(given.problems), None
    try:
        reading = read(path, given.overrides, problems)
        config, problems = reading.config, problems + reading.problems
        if config is not None and given.as_slime:
            problems += slime_defaults.refusals(config)
        if reading.remaining is not None:
            starts = starts(reading.remaining) if callable(starts) else starts
            inspection, engines, wrong = _settled(reading.remaining, starts, fresh, cluster, whole=not problems)
            config, problems = inspection.frozen, [*problems, *map(reading.with_origin, wrong)]
            os.environ.update(given.environment)
            inspection.guesses += filter(None, [engines])
            reported = [] if problems else [*given.notes, *reading.notes, *inspection.guesses]
            problems += map(reading.with_origin, inspect(inspection, reported))
    except BadInput as error:
        problems += problems_of(error)
    distinct = {str(problem): problem for problem in problems}.values()  # two may ask one server
    raise_problems([flags.named(problem, given.typed, alone=path is None) for problem in distinct])
    assert inspection is not None  # or there was a problem
    return inspection


def _settled(config: RunConfig, starts: bool, fresh: bool, cluster: tuple[int, int] | None, whole: bool) -> Settled:
    """Returns the inspection of a config, its names pinned and its steps counted, the line about its engines, and the problems met: fields
    that they name are left out, and with them all names on the hub."""
    try:
        hub = Hub.of()
        pinned, engines = _with_all_engines(run_access.pinned_config(config, hub, fresh=fresh), starts, cluster)
        inspection = Inspection(hub_resolve.local(pinned, hub=hub), starts, whole, fresh)
        rollout, steps = objective_checks.settled(inspection), objective_checks.sft_steps(inspection)
        sizes, tokens = run_plan.settle_trainer(inspection)
        inspection.config, inspection.frozen = (
            known.with_fields(sft=steps, trainer=sizes).model_copy(update={"rollout": rollout}) for known in (inspection.config, pinned)
        )
        inspection.guesses += filter(None, [tokens])
        return inspection, engines, []
    except (AttributeError, BadInput) as error:
        found = refusals_of(error)
    named = {name for problem in found for name in fields_named(problem)}
    named |= {name for _, section in config for name, value in section if hub_names.PREFIX in repr(value)}
    return Inspection(without(config, named), starts, whole=False, fresh=fresh, frozen=config), "", found


def _with_all_engines(config: RunConfig, starts: bool, cluster: tuple[int, int] | None) -> tuple[RunConfig, str]:
    """Returns the config with engines on all GPUs, where it does not say how many there are, and the line about it.

    Services that are started elsewhere are as many as somebody starts.
    """
    if not (starts or cluster) or devices.resolve(config.rollout.rollout_device) != "cuda":
        return config, ""
    nodes, gpus = cluster or (config.rollout.nodes_per_engine, len(devices.visible_gpus()))
    return service_plan.filled(config, nodes, gpus, trains=devices.resolve(config.trainer.train_device) == "cuda")


def inspect(inspection: Inspection, reported: Sequence[str] = ()) -> list[BadInput]:
    """Returns the problems that all checks find, in their order; where there are none, prints the notes on standard error.

    ``told``: notes of before.
    """
    problems, notes, known = list[BadInput](), list(reported), 0
    debug = inspection.config.debug
    met = (STARTS if inspection.starts else ALWAYS) | (ALWAYS if debug.debug_rollout_only else TRAINS)
    met |= ALWAYS if debug.trains_only else GENERATES
    for check in (check for check, when in CHECKS.items() if when in met):
        try:
            for finding in check(inspection):
                if isinstance(finding, Note):
                    notes.append(" ".join(finding.text.split()))
                else:
                    problems.append(finding)
        except (AttributeError, BadInput) as error:
            problems += refusals_of(error)
        problems += inspection.problems[known:]
        known = len(inspection.problems)
    inspection.notes = notes
    for line in [] if problems else notes:
        say(f"myxo: {printable_line(line, LONGEST_NOTE)}")
    return problems
