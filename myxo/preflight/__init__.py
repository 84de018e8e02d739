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

from myxo.preflight import (
    data_checks,
    engine_checks,
    file_checks,
    function_checks,
    hub_checks,
    label_checks,
    layout_checks,
    length_checks,
    machine_checks,
    model_checks,
    resource_checks,
    run_checks,
)
from myxo.preflight.inspection import Inspection
from shared.config import flags
from shared.config.run_config import RunConfig, read
from shared.hub import hub_resolve
from shared.hub.hub_client import Hub
from shared.runtime.errors import BadInput, problems_of, raise_problems

Check = Callable[[Inspection], Iterable[BadInput]]

CHECKS: tuple[Check, ...] = (
    file_checks.check_model,
    file_checks.check_tokenizer,
    file_checks.check_data,
    file_checks.check_packages,
    machine_checks.check_packages,
    machine_checks.check_gpus,
    model_checks.check_actor,
    model_checks.check_other_models,
    model_checks.check_flags,
    layout_checks.check_ranks,
    layout_checks.check_engines,
    layout_checks.check_training,
    engine_checks.check_flags,
    engine_checks.check_cpu_backend,
    length_checks.check_context_flag,
    function_checks.check,
    run_checks.check,
    resource_checks.check_directories,
    resource_checks.check_disk,
    resource_checks.check_memory,
    resource_checks.check_limits,
    data_checks.check_training_prompts,
    data_checks.check_heldout_prompts,
    data_checks.check_demonstrations,
    data_checks.check_overlap,
    label_checks.check,
    length_checks.check,
)
"""In the order in which their problems are told; what takes longest stands last, and behind it what needs what that has read."""


def checked_config(path: Path, arguments: list[str], *, starts: bool = False, fresh: bool = False) -> RunConfig:
    """Returns the config with ``arguments`` (flags of `shared.config.flags`) laid over it, after all checks; its names on the hub are
    pinned, and their files on this machine.

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
            config = hub_checks.pinned(config, hub, fresh=fresh)
            problems += inspect(Inspection(hub_resolve.local(config, hub=hub), starts, fresh, frozen=config))
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
