"""Shows a run's progress: ``myxo status`` now or at its last record, ``myxo watch`` until it ends, ``myxo summary`` in figures.
``myxo list`` shows the runs of a directory, ``myxo compare`` what differs in the configs and the results of some, and their rewards.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run
from myxo.display import reward_chart
from myxo.display.progress_display import Display, alarm_lines, panel
from myxo.launch import exit_report
from myxo.run.run_access import ALARM_SECONDS, Access, RunWatch, reach
from myxo.run.run_directory import READING, RunDirectory
from shared.bus import runs
from shared.bus.bus_errors import BUS_ERRORS
from shared.bus.registry import ENVIRONMENT, Registry
from shared.config.run_config import RunConfig
from shared.data.metric_files import MetricDirectory
from shared.model.final_exports import final_exports, missing_exports
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError, MyxoError
from shared.runtime.safe_text import json_text, number, printable_line, say, shortened_line
from shared.view.alarms import Alarm
from shared.view.flow_history import REWARD
from shared.view.run_summary import Summary, SummaryTally, collect
from shared.view.run_view import LATELY_SECONDS, RunView, run_view, with_failures
from shared.view.stall import run_stall

POLL_INTERVAL_S = 0.5
LONGEST_REASON = 1000  # characters of the reason of a run that failed


class NotAtWork(MyxoError):
    """The run is not at work, so that there is nothing to watch."""


def declare_status(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo status``."""
    add_run(command)
    add_json(command)
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(status(parsed.run, parsed.dir, console, parsed.json)))


def declare_list(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo list``."""
    command.add_argument("dir", metavar="DIR", type=Path, nargs="?", default=Path("runs"), help="where runs lie (default runs)")
    add_json(command)
    command.set_defaults(run_command=lambda parsed, console: list_runs(parsed.dir, console, parsed.json))


def declare_watch(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo watch``."""
    add_run(command)
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(watch(parsed.run, parsed.dir, console)))


def declare_summary(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo summary``."""
    add_run(command)
    add_json(command)
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(summary(parsed.run, parsed.dir, console, parsed.json)))


def list_runs(directory: Path, console: Console, as_json: bool) -> int:
    """Prints the runs in a directory by their files, the newest last. Raises ConfigError where there is no directory."""
    if not directory.is_dir():
        raise ConfigError("DIR", str(directory), "a directory with runs; there is none, and `myxo up CONFIG` makes one")
    found = sorted(filter(None, map(_listed, directory.iterdir())), key=lambda run: run["at"])
    table = Table("run", "state", "step", "reward", "last at work", box=None)
    for run in found:
        reward = "–" if run["reward"] is None else number(run["reward"], ".3f")
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(run["at"]))
        table.add_row(Text(run["run"]), run["state"], f"{run['step']}/{run['of']}", reward, when)
    console.file.write(json_text(found) + "\n") if as_json else console.print(table)
    return exit_codes.DONE


def _listed(path: Path) -> dict[str, Any] | None:
    """Returns a run by the metrics in its directory; None for another directory."""
    if (config := runs.frozen(path)) is None:
        return None
    files = RunDirectory(path)
    with contextlib.suppress(ConfigError):  # a copy under another name
        config = files.placed(config, quiet=True)
    of, frozen_at = config.rollout.num_rollout, (path / runs.FROZEN).stat().st_mtime
    scalars = list(MetricDirectory(config.trained / "tensorboard").read())
    # a function of the user's may log rewards instead, and a run may train nothing
    step, at = max(((one.step + 1, one.at) for one in scalars if one.tag in (REWARD, "train/loss")), default=(0, frozen_at))
    _, reward = max(((one.step, one.value) for one in scalars if one.tag == REWARD), default=(0, None))
    known = bool(of or final_exports(config))  # of demonstrations alone, the export after them tells that they have ended
    finished = step >= of if of else not missing_exports(config)
    at_work = files.is_held() and READING not in (path / "lock").read_text()
    stopped = "stopped" if files.log("launcher").exists() else "–"  # services of `myxo submit` are known to its bus alone
    state = "running" if at_work else "–" if not known else "finished" if finished else stopped
    return {"run": path.name, "state": state, "step": step, "of": of, "reward": reward, "at": at}


async def status(run: str, directory: Path, console: Console, as_json: bool) -> int:
    """Prints how a run stands. Raises ConfigError where there is no such run."""
    async with reach(run, directory) as access:
        services = await Registry(access.bus, access.run).alive() if access.live else []
        phase, reason = await _phase(access)
        running = any(service.service != ENVIRONMENT for service in services)
        if running:
            watched = RunWatch(access.bus, access.config, access.directory.root)
            alarmed = await watched.standing(services, live=True)
            wait = run_stall(await watched.situation(services))
            failures = watched.history.failures
            view = with_failures(run_view(access.config, services, wait=wait), failures, failures.restarts.total())
            found = _running(view, alarmed, console, as_json)
        else:
            tally = await collect(access.bus, access.config)
            alarmed, found = tally.alarms(), _at_rest(access, phase, tally, console, as_json)
        if as_json:
            state = {"phase": phase, "reason": reason, "running": running, "alarms": [alarm.plain() for alarm in alarmed]}
            console.file.write(json_text({**state, **found}) + "\n")
        elif reason:
            console.print(Text(f"Run {access.run} failed: {printable_line(reason, LONGEST_REASON)}", style="red"), soft_wrap=True)
    return exit_codes.DONE


async def _phase(access: Access) -> tuple[str | None, str]:
    """Returns the run's phase and the reason of one that has failed. Where the bus's cannot be read, the ledger says whether the run is
    finished, and a line on the standard error says so."""
    phase, reason = await runs.phase_and_reason(access.bus, access.run)
    if phase == runs.UNREADABLE:
        say(f"the phase of run {access.run} on the bus cannot be read; its ledger stands for it")
        phase = runs.FINISHED if await runs.is_finished(access.bus, access.config) else None
    return phase, reason


def _running(view: RunView, alarmed: list[Alarm], console: Console, as_json: bool) -> dict[str, Any]:
    if as_json:
        fields = asdict(view)
        for line in fields["services"]:
            del line["restarts"]
        return fields
    console.print(panel(view, alarms=alarmed))
    for line in view.services:
        if line.http:
            console.print(Text(f"metrics of {line.instance}: http://{line.http}/metrics", style="dim"), soft_wrap=True)
    return {}


def _at_rest(access: Access, phase: str | None, tally: SummaryTally, console: Console, as_json: bool) -> dict[str, Any]:
    summary = tally.summary()
    run, of, groups = access.run, access.config.rollout.num_rollout, summary.groups
    if as_json:
        figures = {"run": run, "steps": summary.steps, "of": of, "in_flight": groups.in_flight, "dead": groups.dead}
        return {**figures, "restarts": sum(summary.restarts.values()), "eval_failed": summary.eval_failed, "errors": summary.errors}
    line = f"Run {run} is finished: {summary.steps} of {of} steps. `myxo summary {run}` tells more."
    if phase != runs.FINISHED:
        line = f"Run {run} is not running: {summary.steps} of {of} steps trained, {groups.in_flight} groups in flight. "
        line += "It failed; the reason is below." if phase == runs.FAILED else f"{_continued(access)}."
    console.print(line, soft_wrap=True)
    for text in alarm_lines(tally.alarms()):
        console.print(text, soft_wrap=True)
    for name, value in exit_report.troubles_of(summary):
        console.print(f"  {name} {value}", soft_wrap=True)
    return {}


def _continued(access: Access) -> str:
    return f"`myxo {'serve' if access.config.tinker.tinker_endpoint else 'up'}` with its config continues"


async def watch(run: str, directory: Path, console: Console) -> int:
    """Shows progress until the run has ended, then its audit and summary. A bus that is away for a while is waited for.

    Returns 0, 1 where the audit found a violation, 3 where the run failed. Raises ConfigError where there is no such run, NotAtWork.
    """
    async with reach(run, directory) as access:
        watched = RunWatch(access.bus, access.config, access.directory.root)
        if (await _phase(access))[0] not in runs.ENDS:
            if not access.live:
                raise NotAtWork(f"run {access.run} is not running; {_continued(access)}")
            await _until_end(access, watched, console)
        code = await exit_report.report_in_time(access.bus, watched.config, access.directory, console)
        phase, reason = await runs.phase_and_reason(access.bus, access.run)
        if phase == runs.FAILED:
            say(f"myxo: run {access.run} failed: {reason}")
            return exit_codes.RUN_FAILED
        return code


async def _until_end(access: Access, watched: RunWatch, console: Console) -> None:
    run, bus = access.run, access.bus
    began = await runs.trained_steps(bus, run)
    view = RunView.at_start(access.config, began)
    registry, shown, phase = Registry(bus, run), Display(console, time.monotonic()), runs.RUNNING
    history = watched.history
    alarmed, judged = list[Alarm](), -ALARM_SECONDS
    try:
        while True:
            try:
                services, (found, reason) = await registry.alive(), await runs.phase_and_reason(bus, run)
                if found in runs.ENDS or time.monotonic() > judged + ALARM_SECONDS:
                    alarmed, judged = await watched.standing(services, live=True), time.monotonic()
                if watched.history is not history:  # also of a run that was begun anew
                    began, history = await runs.trained_steps(bus, run), watched.history
                    view = RunView.at_start(watched.config, began)
                now = time.time()
                view = run_view(watched.config, services, before=view, began=began, wait=await watched.wait(services, now))
                view = with_failures(view, history.failures_since(now - LATELY_SECONDS), history.failures.restarts.total())
                phase = found or runs.RUNNING
                view = view.stopped(reason if phase == runs.FAILED else "")
            except BUS_ERRORS as error:
                now = time.time()
                wait = watched.wait_without_bus(str(error) or type(error).__name__, now)
                view = replace(view, services=(), waiting_for=wait.words(now), waiting_since=wait.since, stalled=True)
            if phase == runs.FINISHED:
                view = view.finished()
            shown.show(view, time.monotonic(), alarmed)
            if phase in runs.ENDS:
                return
            await asyncio.sleep(POLL_INTERVAL_S)
    finally:
        shown.close()


async def summary(run: str, directory: Path, console: Console, as_json: bool = False) -> int:
    """Writes and prints a run's summary. Raises ConfigError where there is no such run."""
    async with reach(run, directory) as access:
        return await exit_report.report(access.bus, access.config, access.directory, console, as_json)


PLACES = {("run", "name"), ("run", "dir")}  # fields in which runs always differ


def declare_compare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``myxo compare``."""
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
