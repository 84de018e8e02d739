"""The commands that show a group again in a terminal, and train its batch again. Pure."""

import shlex
from pathlib import Path

from pydantic import BaseModel

from shared.config.run_config import RunConfig
from shared.data.rollout_files import TRAINED
from shared.history.group_history import BATCHED, GroupRecord


class ReplayCommand(BaseModel):
    """A command and what it does; without one, ``what`` says how to have it."""

    what: str
    command: str | None = None


def replay_commands(run: str, directory: Path | None, config: RunConfig | None, group: GroupRecord) -> list[ReplayCommand]:
    """Returns the commands of a group."""
    place = run if directory is None else str(directory)
    shown = ReplayCommand(what="shows it in a terminal", command=shlex.join(["myxo", "samples", place, group.group]))
    if group.status not in (TRAINED, BATCHED) or config is None:
        return [shown]
    return [shown, batch_command(directory, config, group.step)]


def batch_command(directory: Path | None, config: RunConfig, step: int | None) -> ReplayCommand:
    """Returns the command that trains the batch of a step again."""
    template = config.debug.rollout_dump
    if template is None:
        return ReplayCommand(what="To train its batch again, have the run keep its batches: --dump-details DIR")
    if config.algorithm.has_critic:
        return ReplayCommand(what="Its batch cannot be trained again from a dump: the critic's values are not in it")
    where = "CONFIG" if directory is None else str(directory)
    words = ["myxo", "replay", where, template, "--deterministic"]
    return ReplayCommand(what=f"trains the batches up to step {step} again, and prints each step's metrics", command=shlex.join(words))
