"""Everything that can be wrong with a run's input, found before anything is started, all of it at once.

A *check* takes an `Inspection` and yields ConfigErrors: the field, what was given, what would be right. It may also raise one, which then
is its last. What does not keep a run from its end is a note (`Inspection.note`), told where nothing is refused. Checks are independent:
each leaves out what it cannot look at for the sake of something that another check reports. A new one is a function in a module of this
package, named after what it looks at, and stands in `CHECKS`. None needs a GPU, all together take seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from shared import flags
from shared.cli.preflight import (
    data,
    engine,
    existing_run,
    files,
    functions,
    hub_names,
    labels,
    layout,
    lengths,
    machine,
    model,
    resources,
)
from shared.cli.preflight.inspection import Inspection
from shared.config import RunConfig, read
from shared.errors import BadInput, problems_of, raise_problems
from shared.hub import resolve
from shared.hub.client import Hub

Check = Callable[[Inspection], Iterable[BadInput]]

CHECKS: tuple[Check, ...] = (
    files.check_model,
    files.check_tokenizer,
    files.check_data,
    files.check_packages,
    machine.check_packages,
    machine.check_gpus,
    model.check_actor,
    model.check_other_models,
    model.check_flags,
    layout.check_ranks,
    layout.check_engines,
    layout.check_training,
    engine.check_flags,
    engine.check_cpu_backend,
    lengths.check_context_flag,
    functions.check,
    existing_run.check,
    resources.check_directories,
    resources.check_disk,
    resources.check_memory,
    resources.check_limits,
    data.check_training_prompts,
    data.check_heldout_prompts,
    data.check_demonstrations,
    data.check_overlap,
    labels.check,
    lengths.check,
)
"""In the order in which their problems are told; what takes longest stands last, and behind it what needs what that has read."""


def checked_config(path: Path, arguments: list[str], *, starts: bool = False, fresh: bool = False) -> RunConfig:
    """Returns the config with ``arguments`` (flags of `shared.flags`) laid over it, after all checks; its names on the hub are pinned, and
    their files on this machine.

    Tells on standard error what is worth knowing of a config that can run: prompts that are left out, a disk that may fill.

    Args:
        starts: whether this is the machine that all services start on. fresh: whether what the run has done so far is to be removed.

    Raises ConfigError, or Problems of several.
    """
    overrides, problems = flags.read(arguments)
    try:
        config, found = read(path, overrides)
        problems += found
        if config is not None:
            hub = Hub.of()
            config = hub_names.pinned(config, hub, fresh=fresh)
            problems += inspect(Inspection(resolve.local(config, hub=hub), starts, fresh, frozen=config))
    except BadInput as error:
        problems += problems_of(error)
    raise_problems(problems)
    assert config is not None  # or there was a problem
    return config


def inspect(inspection: Inspection) -> list[BadInput]:
    """Returns what all checks find, in their order; where that is nothing, tells on standard error what they note."""
    problems: list[BadInput] = []
    for check in CHECKS:
        try:
            for problem in check(inspection):
                problems.append(problem)
        except BadInput as error:
            problems += problems_of(error)
    for line in [] if problems else inspection.notes:
        print(f"myxo: {line}", file=sys.stderr)
    return problems
