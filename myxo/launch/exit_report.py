"""The report at the end of a run: summary.json, the picture, a table, and the audit's verdict."""

import asyncio
import re
import time
from collections import Counter
from dataclasses import asdict

import nats.errors
import structlog
from rich.console import Console
from rich.table import Table
from rich.text import Text

from myxo.display import SafeConsole, reward_chart
from myxo.display.progress_display import alarm_lines
from myxo.display.reward_chart import text_chart
from myxo.run.run_directory import RunDirectory, checkpoints
from shared.bus.connection import TRANSIENT, Bus
from shared.config.run_config import RunConfig
from shared.runtime import exit_codes, failure_summary
from shared.runtime.errors import DeadlineExceeded
from shared.runtime.safe_files import replace_file
from shared.runtime.safe_text import by_fault, duration, figure_table, json_text, shortened_line
from shared.view.run_summary import EvaluationSummary, GroupCounts, Summary, SummaryTally, collect

MOST = 5  # kinds of reasons, and services, that are listed
REPORT_SECONDS = 120.0  # time for which the summary is tried again when the connection to the bus breaks
YOURS = {"custom_rm": "reward", "custom_generate_function": "generate function", "rollout_function": "rollout function", "agent": "agent"}
YOURS |= {"agent_command": "agent", "dynamic_sampling_filter": "filter", "rollout_sample_filter": "filter"}
"""Fields of functions without ``_path``, as reasons name them, and what a user calls these."""

CHART_WIDTH, CHART_HEIGHT = 60, 8  # columns and lines of the rewards' curve
AGAIN_SECONDS = 0.5  # pause before the summary is tried again


async def report(bus: Bus, config: RunConfig, directory: RunDirectory, console: Console, as_json: bool = False) -> int:
    """Sums the run up into its directory and onto the console. Returns 0, or 1 where the audit found a violation."""
    tally = await collect(bus, config)
    summary = tally.summary()
    if as_json:
        console.file.write(json_text(asdict(summary)) + "\n")
        console = SafeConsole(stderr=True)
    else:
        for line in alarm_lines(tally.alarms()):
            console.print(line, soft_wrap=True)
        console.print(table(summary))
    try:
        _write(tally, summary, directory, console)
    except OSError as error:  # on a full disk the table is all there is
        console.print(f"Summary and picture cannot be written: {error}; `myxo summary {config.run.name}` tries again.", soft_wrap=True)
    return exit_codes.DONE if summary.audit == "ok" else exit_codes.FAILED


def _write(tally: SummaryTally, summary: Summary, directory: RunDirectory, console: Console) -> None:
    directory.root.mkdir(parents=True, exist_ok=True)
    replace_file(directory.summary, f"{json_text(asdict(summary))}\n".encode())
    for line in text_chart(tally.rewards, width=CHART_WIDTH, height=CHART_HEIGHT):
        console.print(Text(line), no_wrap=True, crop=False)
    if why := reward_chart.obstacle(tally.rewards):
        console.print(f"No picture: {why}.")
    else:
        reward_chart.draw(summary, tally.rewards, tally.warm_start, directory.chart)
        console.print(f"Picture: {directory.chart}", soft_wrap=True)
    console.print(f"Summary: {directory.summary}", soft_wrap=True)


async def report_in_time(bus: Bus, config: RunConfig, directory: RunDirectory, console: Console) -> int:
    """Returns the result of `report`, which is tried again for `REPORT_SECONDS` where the connection to the bus breaks."""
    end = time.monotonic() + REPORT_SECONDS
    while True:
        try:
            return await report(bus, config, directory, console)
        except (DeadlineExceeded, nats.errors.Error, *TRANSIENT) as error:
            if time.monotonic() > end:
                raise
            structlog.get_logger().warning("report_again", error=str(error) or type(error).__name__)
            await asyncio.sleep(AGAIN_SECONDS)


async def report_troubles(bus: Bus, config: RunConfig, console: Console) -> None:
    """Prints the alarms and the failures, if there were any, of a run that ends unfinished."""
    tally = await collect(bus, config)
    for line in alarm_lines(tally.alarms()):
        console.print(line, soft_wrap=True)
    rows = troubles_of(tally.summary())
    if rows:
        console.print(figure_table(rows, f"Run {config.run.name}, what went wrong"))


def next_commands(config: RunConfig, again: str) -> str:
    """Returns what is saved of a run that was stopped, and the commands that continue it (``again``), export it and show its samples."""
    run, saved = config.run.argument, max(checkpoints(config), default=0)
    export, step = (f"\n  export:   myxo export {run}", f" --step {saved - 1}") if saved else ("", "")
    return f"{f'saved step {saved}' if saved else 'no checkpoint yet'}\n  continue: {again}{export}\n  samples:  myxo samples {run}{step}"


def troubles_of(summary: Summary) -> list[tuple[str, str]]:
    """Returns dead groups by what was at fault; they and failed prompts by reason, restarts and failures by service, the most frequent of
    each, and the last waits."""
    rows = [("dead by fault", by_fault(summary.groups.faults))] if summary.groups.faults else []
    rows += [("never trained", words)] if (words := never_trained(summary.groups)) else []
    for name, reasons in (("dead", summary.groups.dead), ("held-out failed", summary.eval_failed)):
        rows += [(name, f"{count}: {shortened_line(reason)}") for reason, count in failure_summary.most(reasons, MOST)]
    restarts = sorted(summary.restarts.items(), key=lambda entry: -entry[1])
    for instance, count in restarts[:MOST]:
        reason = summary.errors.get(instance)
        rows.append(("restarts", f"{instance} {count}" + (f", last {shortened_line(reason)}" if reason else "")))
    elsewhere = [(instance, reason) for instance, reason in summary.errors.items() if instance not in summary.restarts]
    rows += [("failed", f"{instance}: {shortened_line(reason)}") for instance, reason in elsewhere[-MOST:]]
    return rows + [("waited", shortened_line(words)) for words in summary.waits[-MOST:]]


def never_trained(groups: GroupCounts) -> str:
    """Returns which share of the prompts that have ended failed, and which function of the user's most of these failed by."""
    dead = sum(groups.dead.values())
    if not dead:
        return ""
    causes = Counter[str]()
    for reason, count in groups.dead.items():
        field = re.search(r"\.(\w+?)(?:_path)? = ", reason)
        causes[YOURS.get(field[1], "") if field else ""] += count
    cause, count = causes.most_common(1)[0]
    most = f": your {cause} failed" + (f" for {count} of {dead}" if count < dead else "") if cause else ""
    ended = dead + groups.trained + sum(groups.dropped.values())
    share = 100 if dead == ended else min(max(round(100 * dead / ended), 1), 99)  # neither none nor all where it is some
    return f"{share} % of prompts were never trained{most}"


def table(summary: Summary) -> Table:
    """Returns the summary in about a dozen lines."""
    groups, warm = summary.groups, summary.warm_start
    lines = []
    for name in dict.fromkeys(evaluation.dataset for evaluation in summary.evaluations):
        found = [evaluation for evaluation in summary.evaluations if evaluation.dataset == name]
        first, last = found[0], found[-1]
        end = f" → {last.mean_reward:.3f} (v{first.version} → v{last.version})" if len(found) > 1 else f" (v{first.version})"
        lines.append((f"eval/{name}", f"{first.mean_reward:.3f}{end}, mean reward{evaluation_details(last)}"))
    lines = [
        ("steps", f"{summary.steps} in {duration(summary.wall_seconds)}" + ("" if summary.finished else ", not finished")),
        *([("warm start", f"{warm.steps} SFT steps, loss {warm.loss_first:.3f} → {warm.loss_last:.3f}")] if warm else ()),
        *lines,
        ("training reward", f"{_number(summary.reward_first)} → {_number(summary.reward_last)} (first and last 10 % of steps)"),
        ("staleness", f"{_number(summary.mean_staleness, '.2f')} mean, {summary.max_staleness_seen} max, bound {summary.max_staleness}"),
        ("generation", f"{summary.generation_seconds:.1f} s"),
        ("training", f"{summary.training_seconds:.1f} s, {summary.overlap_seconds:.1f} s of it while generating"),
        ("engine − trainer", f"{_number(summary.mean_abs_logprob_diff, '.2e')} mean |Δ log-prob| at equal versions"),
        ("trained tokens", f"{summary.trained_tokens:,}".replace(",", " ")),
        *((f"from step {change['step']}", ", ".join(change["changed"])) for change in summary.changes),
        ("groups", f"{groups.admitted} admitted, {groups.trained} trained, {groups.in_flight} in flight"),
    ]
    lines += [("dropped", f"{count}: {shortened_line(reason)}") for reason, count in groups.dropped.items()]
    lines += troubles_of(summary)
    rows = figure_table(lines, f"Run {summary.run}")
    if summary.audit == "ok":
        rows.add_row(Text("audit", style="dim"), Text("ok", style="green"))
    for violation in [] if summary.audit == "ok" else summary.audit:
        rows.add_row(Text("violation", style="bold red"), Text(violation))
    return rows


def evaluation_details(found: EvaluationSummary) -> str:
    """Returns what an evaluation tells besides its mean reward, each part behind a comma; nothing of what is as usual."""
    rates = [f"{name} {value:.3f}" for name, value in found.rates.items() if not name.endswith(("@1", "^1"))]
    lengths = [f"{found.lengths['mean']:.1f} tokens"] if found.lengths else []
    truncated = [f"{100 * found.truncated:.0f} % truncated"] if found.truncated else []
    missing = found.failed + found.late
    parts = [f"{found.prompts - missing} of {found.prompts} prompts"] if missing else []
    later = [f"drawn up to v{found.newest}"] if found.newest > found.version else []
    return "".join(f", {part}" for part in (*rates, *lengths, *truncated, *parts, *later))


def _number(value: float | None, form: str = ".3f") -> str:
    return "–" if value is None else f"{value:{form}}"
