"""Writes the tables of ``docs/accounts.md`` from the rights that the servers are given: ``python -m docs.accounts [--check]``."""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

from docs.catalogue import settle
from shared.accounts.permissions import HEALTH, OPERATOR, Rights, StoreRights, rights
from shared.bus.subjects import Subjects

PAGE = Path(__file__).with_name("accounts.md")

BEGIN, END = "<!-- written by `python -m docs.accounts` -->\n", "<!-- end -->\n"

RUN = "<run>"

_WRITING = {"set": "write", "setnx": "add", "rpush": "create", "rpushx": "append", "unlink": "remove"}
"""Commands that change a key, and what each comes to in words."""


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.accounts", description="the tables of docs/accounts.md from the rights")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the page is out of date")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return settle(PAGE, before + BEGIN + "\n".join(render()) + "\n" + END + rest.partition(END)[2], parser.parse_args().check)


def render() -> list[str]:
    """The tables."""
    lines = []
    roles = rights(RUN)
    for role in roles:
        lines += [f"### {role.role}", "", *_role(role), ""]
    lines += [f"### {HEALTH}", "", "Redis only, for the health check inside its container: `ping`.", ""]
    return lines


def _role(role: Rights) -> list[str]:
    ways = [("publishes", role.bus.publish), ("listens on", role.bus.subscribe)]
    lines = ["| | NATS subjects |", "|---|---|"]
    lines += [f"| {way} | {_subjects(role, subjects) or 'nothing'} |" for way, subjects in ways]
    if role.bus.answer_seconds is not None:
        lines.append(f"| answers | once to each request that it has received, within {role.bus.answer_seconds} s |")
    if role.store is None:
        return [*lines, "", "Redis: no account."]
    granted = [_granted(rights) for rights in (role.store, *role.store.further)]
    return [*lines, "", f"Redis: {'. Further: '.join(granted)}."]


def _granted(store: StoreRights) -> str:
    commands = ", ".join(f"`{command.replace('|', ' ')}`" for command in store.commands)
    changes = [word for command, word in _WRITING.items() if command in store.commands]
    keys = [f"`{keys}` (read)" for keys in store.read if keys not in store.write]
    keys += [f"`{keys}` (read, {', '.join(changes)})" for keys in store.write]
    return f"{commands}; keys {', '.join(keys)}"


def _subjects(role: Rights, subjects: Iterable[str]) -> str:
    """The operator's rights to the run's streams are the same for each: one stands for all."""
    names = Subjects(RUN)
    if role.role == OPERATOR:
        kept = [subject for subject in subjects if not subject.startswith("$J") or names.task_stream in subject or RUN not in subject]
        subjects = [subject.replace(names.task_stream, "<stream of the run>") for subject in kept]
    return " <br> ".join(f"`{subject}`" for subject in subjects)


if __name__ == "__main__":
    sys.exit(main())
