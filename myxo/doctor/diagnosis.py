"""What an examination finds."""

import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "note", "fault"]

COMMAND_SECONDS = 15.0
"""The deadline of a program that is asked."""


@dataclass(frozen=True)
class Diagnosis:
    """One thing that was looked at. ``fault``: runs fail for it; ``note``: they may. ``mend``: the command, or what to do in words."""

    subject: str
    state: State
    found: str
    mend: str = ""


Examination = Callable[[Path], Iterator[Diagnosis]]


def told_by(command: Sequence[str]) -> tuple[str, str]:
    """Returns (what a program printed, why it failed); one of the two is empty."""
    shown = shlex.join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMMAND_SECONDS)
    except FileNotFoundError:
        return "", f"{command[0]} is not on PATH"
    except OSError as error:
        return "", f"{shown} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{shown} did not end within {COMMAND_SECONDS:g} s"
    if done.returncode != 0:
        return "", f"{shown} ended with {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-300:]}"
    return done.stdout, ""
