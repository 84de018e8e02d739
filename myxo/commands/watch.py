"""``myxo watch RUN``: the progress of a run whose services were started elsewhere, until it is finished; then its audit and summary."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path

import nats.errors
from rich.console import Console

from myxo.display.progress_display import display
from myxo.launch import exit_report
from myxo.run import troubles
from myxo.run.run_access import Access, reach
from myxo.run.run_view import View, look
from shared.bus import runs
from shared.bus.connection import TRANSIENT
from shared.bus.registry import Registry
from shared.runtime import exit_codes
from shared.runtime.errors import MyxoError
from shared.schema.ledger import BatchTrained

POLL_INTERVAL_S = 0.5

REPORT_SECONDS = 120.0
"""How long the summary is tried again where the bus breaks off."""


ENDS = (runs.FINISHED, runs.FAILED)


class NotAtWork(MyxoError):
    """There is nothing to watch."""


async def watch(run: str, directory: Path, console: Console) -> int:
    """Shows progress until the run is finished, then reports. A bus that is away for a while is waited for.

    Returns 0, or 1 where the audit found a violation or the run failed. Raises ConfigError where there is no such run, NotAtWork.
    """
    async with reach(run, directory) as access:
        if await runs.phase(access.bus, access.run) not in ENDS:
            if not access.live:
                raise NotAtWork(f"run {access.run} is not running; `myxo up` with its config goes on")
            await _until_end(access, console)
        code = await _report(access, console)
        phase, reason = await runs.phase_and_reason(access.bus, access.run)
        if phase == runs.FAILED:
            print(f"myxo: run {access.run} failed: {reason}", file=sys.stderr)
            return exit_codes.FAILED
        return code


async def _until_end(access: Access, console: Console) -> None:
    config, run, bus = access.config, access.run, access.bus
    trained = await runs.last_record(bus, run, BatchTrained)
    began = trained.step + 1 if trained else 0
    view = View(run, began, config.rollout.num_rollout, config.rollout.max_staleness)
    registry, shown, phase = Registry(bus, run), display(console, time.monotonic()), runs.RUNNING
    try:
        while True:
            try:
                view = look(config, await registry.alive(), before=view, began=began)
                view = replace(view, troubles=await troubles.with_failure(bus, run, view.troubles))
                phase = await runs.phase(bus, run) or runs.RUNNING
            except (MyxoError, nats.errors.Error, *TRANSIENT) as error:
                view = replace(view, services=(), waiting_for=f"the bus ({error or type(error).__name__})")
            if phase == runs.FINISHED:  # the cards may be seconds behind
                view = replace(view, steps=view.of, waiting_for=None)
            shown.show(view, time.monotonic())
            if phase in ENDS:
                return
            await asyncio.sleep(POLL_INTERVAL_S)
    finally:
        shown.close()


async def _report(access: Access, console: Console) -> int:
    end = time.monotonic() + REPORT_SECONDS
    while True:
        try:
            return await exit_report.report(access.bus, access.run, access.directory, console)
        except (MyxoError, nats.errors.Error, *TRANSIENT):
            if time.monotonic() > end:
                raise
            await asyncio.sleep(POLL_INTERVAL_S)
