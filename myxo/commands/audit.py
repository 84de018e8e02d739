"""``myxo audit RUN``: replays the run's ledger and checks its invariants."""

import argparse
import asyncio
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from myxo.commands.command_arguments import add_json, add_run
from myxo.run.run_access import reach
from shared.bus import streams
from shared.bus.command_log import CommandAudit
from shared.bus.connection import Bus
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.data.rollout_files import DIRECTORY, trained_groups
from shared.runtime import exit_codes
from shared.runtime.safe_text import by_fault, figure_table, json_text
from shared.schema.ledger import LedgerRecord
from shared.schema.ledger_audit import Audit, AuditReport
from shared.schema.messages import LogEntry

# Names of a report's figures in JSON, where they are others.
JSON_NAMES = {"max_staleness": "max_staleness_seen", "masked": "masked_samples", "removed": "removed_samples", "amended": "amended_groups"}


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    add_run(command)
    add_json(command)
    command.set_defaults(run_command=lambda parsed, console: asyncio.run(audit(parsed.run, parsed.dir, console, parsed.json)))


async def audit(run: str, directory: Path, console: Console, as_json: bool) -> int:
    """Prints the verdict. Returns 0, or 1 where an invariant is violated. Raises ConfigError where there is no such run."""
    async with reach(run, directory) as access:
        if access.config.tinker.tinker_endpoint:
            return await audit_commands(access.bus, access.run, console, as_json)
        rollout = access.config.rollout
        checker = Audit(rollout.max_staleness, rollout.rollout_batch_size)
        async for _, record in streams.read(access.bus, Subjects(access.run).ledger_stream, LedgerRecord):
            checker.see(record)
        report = checker.report()
        unread = without_responses(access.config, access.directory.root, report)
        if as_json:
            plain = {JSON_NAMES.get(name, name): value for name, value in vars(report).items() if name != "staleness"}
            console.file.write(json_text({"run": access.run, "ok": report.ok, "without_responses": unread, **plain}) + "\n")
        else:
            console.print(table(access.run, access.config, report, unread))
            for violation in report.violations:
                console.print(Text(f"violation: {violation}", style="bold red"), soft_wrap=True)
    return exit_codes.DONE if report.ok else exit_codes.FAILED


async def audit_commands(bus: Bus, run: str, console: Console, as_json: bool) -> int:
    """Prints the verdict on the log of a run whose commands come from outside (`myxo serve`). Returns as `audit` does."""
    checker = CommandAudit()
    async for _, entry in streams.read(bus, Subjects(run).commands_stream, LogEntry):
        checker.see(entry)
    counts = {"commands": checker.counts["commands"], "carried_out": checker.counts["carried out"], "failed": checker.counts["failed"]}
    counts["waiting"] = counts["commands"] - counts["carried_out"] - counts["failed"]
    if as_json:
        report = {"run": run, "ok": not checker.violations, **counts, "violations": checker.violations}
        console.file.write(json_text(report) + "\n")
    else:
        rows = figure_table((name.replace("_", " "), f"{count}") for name, count in counts.items())
        console.print(f"{run}: {'ok' if not checker.violations else 'VIOLATED'}", rows)
        for violation in checker.violations:
            console.print(Text(f"violation: {violation}", style="bold red"), soft_wrap=True)
    return exit_codes.FAILED if checker.violations else exit_codes.DONE


def without_responses(config: RunConfig, root: Path, report: AuditReport) -> int | None:
    """Returns how many trained groups have no responses in a run's directory; None where not all are kept there, or it cannot be told."""
    kept = trained_groups(root / DIRECTORY) if config.monitoring.keep_rollouts >= 1 else None
    return None if kept is None else max(0, report.trained - kept)


def table(run: str, config: RunConfig, report: AuditReport, unread: int | None) -> Table:
    """Returns what was checked, in a few lines. ``unread``: as `without_responses` returns it."""
    lost = [f"{count} {end} ({reason})" for end in ("dropped", "dead") for reason, count in getattr(report, end).items()]
    ends = [f"{report.trained} trained", *lost, f"{report.in_flight} in flight"]
    samples, bound = report.staleness.total(), config.rollout.max_staleness
    amended = f", {report.amended} groups taken out of their batches" if report.amended else ""
    untrained = {"masked in part or whole": report.masked, "removed": report.removed}
    outside = "".join(f", {count} {what}" for what, count in untrained.items() if count)
    figures = {
        "conservation": f"{report.admitted} admitted = {' + '.join(ends)}",
        **({"dead by fault": by_fault(report.faults)} if report.faults else {}),
        "staleness": f"{report.max_staleness} at most in {samples} trained samples, bound {bound}{outside}",
        "steps": f"{report.steps} trained, {report.durable_steps} durable{amended}" + (", finished" if report.finished else ""),
        "live version": "none yet" if report.live_version < 0 else str(report.live_version),
    }
    if report.repairs:
        figures["repaired"] = f"{report.repairs} times, by `myxo repair`"
    if unread is not None:
        figures["responses"] = f"{report.trained - unread} of {report.trained} trained groups are in {DIRECTORY}/"
    rows = figure_table(figures.items(), f"Audit of run {run}")
    verdict = Text("ok", style="green") if report.ok else Text(f"{len(report.violations)} violations", style="bold red")
    if report.ok and unread:
        verdict = Text(f"the ledger is ok; {unread} trained groups have no responses in {DIRECTORY}/", style="yellow")
    rows.add_row(Text("verdict", style="dim"), verdict)
    return rows
