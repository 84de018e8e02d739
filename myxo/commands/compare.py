"""``myxo compare RUN RUN …``: what differs in the configs and the results of runs, and their rewards on one picture."""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from myxo.commands.command_arguments import add_json
from myxo.display import reward_chart
from myxo.run.run_access import reach
from shared.config.run_config import RunConfig
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from shared.runtime.safe_text import json_text, number, say, shortened_line
from shared.view.run_summary import Summary, SummaryTally, collect

PLACES = {("run", "name"), ("run", "dir")}  # fields in which runs always differ


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    command.add_argument("runs", metavar="RUN", nargs="+", help="the runs' ids, or their directories")
    command.add_argument("--dir", type=Path, default=Path("runs"), help="where runs lie (default runs)")
    command.add_argument("--picture", type=Path, metavar="FILE", help="where to (default compare.png, and none with --json)")
    add_json(command)
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(compare(parsed, console)))


async def compare(parsed: argparse.Namespace, console: Console) -> int:
    """Prints what differs and writes the picture. Returns the exit code. Raises ConfigError where there is no such run, or only one."""
    found: dict[str, SummaryTally] = {}
    versions: dict[Path, str | None] = {}
    for run in parsed.runs:
        async with reach(run, parsed.dir) as access:
            name = access.run if access.run not in found else str(access.directory.root)
            found[name] = await collect(access.bus, access.config)
            path = access.directory.summary
            versions[access.directory.root.resolve()] = json.loads(path.read_text()).get("version") if path.is_file() else None
    if len(versions) < max(2, len(parsed.runs)):
        raise ConfigError("RUN", " ".join(parsed.runs), "at least two runs, each once")
    differing = differences([tally.config for tally in found.values()])
    results = [{"myxo": version, **results_of(tally.summary())} for version, tally in zip(versions.values(), found.values(), strict=True)]
    rewards = {name: tally.rewards for name, tally in found.items()}
    why, picture = reward_chart.obstacle(any(rewards.values())), parsed.picture or (None if parsed.json else Path("compare.png"))
    words = f"No picture: {why}." if why else f"Picture: {picture}"
    if picture is not None and not why:
        reward_chart.draw_together(rewards, picture)
    if parsed.json:
        if picture is not None:
            say(f"myxo: {words}")
        plain = {"runs": list(found), "config": differing, "results": results, "rewards": list(rewards.values())}
        console.file.write(json_text(plain) + "\n")
        return exit_codes.DONE
    console.print(table(list(found), differing, results))
    console.print(words, soft_wrap=True)
    return exit_codes.DONE


def differences(configs: Sequence[RunConfig]) -> dict[str, list[Any]]:
    """Returns the values of each field (``section.field``) in which the configs differ, without credentials, but for the runs' places."""
    plain = [config.shown().model_dump(mode="json") for config in configs]
    fields = [(section, field) for section in plain[0] for field in plain[0][section] if (section, field) not in PLACES]
    values = {f"{section}.{field}": [one[section][field] for one in plain] for section, field in fields}
    return {field: each for field, each in values.items() if any(value != each[0] for value in each)}


def results_of(summary: Summary) -> dict[str, Any]:
    """Returns what a run came to, by name; None of what was not measured."""
    own = {name: getattr(summary, name) for name in ("steps", "finished", "reward_first", "reward_last", "mean_staleness")}
    newest = {f"eval/{found.dataset}": found.mean_reward for found in summary.evaluations}
    return {**own, **newest, **{name: getattr(summary, name) for name in ("trained_tokens", "wall_seconds", "audit")}}


def table(runs: Sequence[str], differing: dict[str, list[Any]], results: Sequence[dict[str, Any]]) -> Table:
    """Returns a column for each run, a row for each field that differs and for each result."""
    rows = Table(Column(no_wrap=True), *(Column(escape(run), overflow="fold") for run in runs), box=None)
    for field, values in differing.items():
        rows.add_row(field, *(Text(shortened_line(json.dumps(value))) for value in values))
    rows.add_section()
    for name in dict.fromkeys(name for one in results for name in one):
        rows.add_row(name, *(Text(_shown(one.get(name))) for one in results))
    return rows


def _shown(value: Any) -> str:
    return "–" if value is None else number(value, ".3f") if isinstance(value, float) else shortened_line(str(value))
