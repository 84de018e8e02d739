"""``myxo status RUN``: how a run stands, now if it is running, at its last record if not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.display.progress_display import panel
from myxo.launch import exit_report
from myxo.run import troubles
from myxo.run.run_access import Access, reach
from myxo.run.run_summary import collect
from myxo.run.run_view import View, look
from shared.bus import runs
from shared.bus.registry import ENVIRONMENT, Registry


async def status(run: str, directory: Path, console: Console, as_json: bool) -> int:
    """Prints it. Raises ConfigError where there is no such run."""
    async with reach(run, directory) as access:
        cards = await Registry(access.bus, access.run).alive() if access.live else []
        phase, reason = await runs.phase_and_reason(access.bus, access.run)
        if all(card.service == ENVIRONMENT for card in cards):
            return await _at_rest(access, phase, reason, console, as_json)
        view = look(access.config, cards)
        view = replace(view, troubles=await troubles.known(access.bus, access.run, view.troubles))
        if as_json:
            _print_json(console, {"phase": phase, "reason": reason, "running": True, **_plain(view)})
        else:
            console.print(panel(view))
            for line in view.services:
                if line.http:
                    console.print(f"metrics of {line.instance}: http://{line.http}/metrics", style="dim", soft_wrap=True)
            _say_failure(access.run, reason, console)
    return 0


async def _at_rest(access: Access, phase: str | None, reason: str, console: Console, as_json: bool) -> int:
    summary = (await collect(access.bus, access.run)).summary()
    of, groups = access.config.rollout.num_rollout, summary.groups
    if as_json:
        figures = {"steps": summary.steps, "of": of, "in_flight": groups.in_flight, "restarts": sum(summary.restarts.values())}
        told = {"dead": groups.dead, "eval_failed": summary.eval_failed, "errors": summary.errors}
        _print_json(console, {"phase": phase, "reason": reason, "running": False, "run": access.run, **figures, **told})
        return 0
    if phase == runs.FINISHED:
        console.print(
            f"Run {access.run} is finished: {summary.steps} of {of} steps. `myxo summary {access.run}` tells more.", soft_wrap=True
        )
    else:
        console.print(
            f"Run {access.run} is not running: {summary.steps} of {of} steps trained, {groups.in_flight} groups in flight. "
            "`myxo up` with its config goes on.",
            soft_wrap=True,
        )
    for name, value in exit_report.troubles_of(summary):
        console.print(f"  {name} {value}", soft_wrap=True, markup=False, highlight=False)
    _say_failure(access.run, reason, console)
    return 0


def _say_failure(run: str, reason: str, console: Console) -> None:
    if reason:
        console.print(f"Run {run} failed: {reason}", soft_wrap=True, markup=False, highlight=False, style="red")


def _plain(view: View) -> dict[str, Any]:
    fields = asdict(view)
    fields["services"] = [{key: value for key, value in line.items() if key != "restarts"} for line in fields["services"]]
    del fields["restarts"]  # known to the launcher alone
    return fields


def _print_json(console: Console, value: dict[str, Any]) -> None:
    console.file.write(json.dumps(value, indent=2) + "\n")
