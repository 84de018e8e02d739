"""A run that continues for hours, and what its processes, its store and its streams hold meanwhile: it must not grow.

The rule: of each series the median of the last quarter is at most `MOST_GROWTH` times that of the second one (the first is its warm-up),
or above it by no more than `SLACK` of its kind. Series: memory and descriptors of every process, keys and bytes of the store, messages of
the streams that work goes through. The ledger and the responses on disk grow by design and are left out.
"""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import nats
import nats.errors
from redis.asyncio import Redis
from redis.exceptions import RedisError

from shared.process.child_process import with_parent
from tests.chaos import results_page
from tests.chaos.fast.fast_config import RUN, FastShape
from tests.chaos.fast.fast_variant import FastVariant
from tests.chaos.observer import Observer
from tests.chaos.schedule import Schedule
from tests.chaos.variant import SERVERS, Start, children, program

MOST_GROWTH = 1.1
SLACK = {"memory": 24 << 20, "descriptors": 4, "keys": 200, "store": 8 << 20, "queued": 200}
"""What a series may gain besides, by its kind: bytes, or things."""

FEWEST_SAMPLES = 8
SAMPLE_SECONDS = 15.0
STEP_SECONDS = "0.5"
"""Of a step: 16,383 versions are told apart, and an hour has 7,200 of these."""

STOP_SECONDS = 60.0
QUEUES = ("task", "generated", "scored")

Series = dict[str, list[float]]


def growing(series: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """Returns the series that break the rule: name → medians of the second and of the last quarter. Pure.

    Names begin with their kind, as ``memory of buffer-0`` does. Raises ValueError for a series that is too short to tell.
    """
    found = {}
    for name, values in series.items():
        if len(values) < FEWEST_SAMPLES:
            raise ValueError(f"{name} has {len(values)} samples; {FEWEST_SAMPLES} are needed")
        quarter = len(values) // 4
        before, after = statistics.median(values[quarter : 2 * quarter]), statistics.median(values[-quarter:])
        if after > before * MOST_GROWTH and after > before + SLACK[name.split()[0]]:
            found[name] = before, after
    return found


async def soak(hours: float, model: Path, every_s: float = SAMPLE_SECONDS) -> dict[str, Any]:
    """Runs for ``hours`` and returns what was sampled, what grew, and the steps trained."""
    directory = Path(tempfile.mkdtemp(prefix="myxo-soak-"))
    (directory / "tmp").mkdir()
    shape = FastShape(steps=1_000_000, save_interval=10, eval_interval=50)
    start = FastVariant(model).prepare(directory, Schedule(0, replace(shape, mode="retract"), ()))
    for link in start.links.values():
        await link.open()
    with (directory / "output").open("wb") as output:
        own = {"TMPDIR": str(directory / "tmp"), "MYXO_CACHE": str(directory / "cache"), "MYXO_CHAOS_STEP_SECONDS": STEP_SECONDS}
        launcher = subprocess.Popen(
            with_parent(start.command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**os.environ, **own, **start.environment},
        )
    series: Series = {}
    try:
        async with Observer(directory / "runs" / RUN, start.addresses) as observer:
            while not observer.steps and launcher.poll() is None:
                await asyncio.sleep(0.1)
            end = time.monotonic() + hours * 3600
            while time.monotonic() < end and launcher.poll() is None:
                await _sample(series, directory, launcher.pid, start, observer)
                await asyncio.sleep(every_s)
            steps, died = observer.steps, launcher.poll()
    finally:
        launcher.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(launcher.wait, STOP_SECONDS)
        if launcher.poll() is None:
            launcher.kill()
    whole = {name: values for name, values in series.items() if len(values) >= FEWEST_SAMPLES}
    return {
        "hours": hours,
        "commit": results_page.commit(),
        "steps": steps,
        "died": died,
        "directory": str(directory),
        "growing": growing(whole),
        "first_and_last": {name: [values[len(values) // 4], values[-1]] for name, values in sorted(whole.items())},
        "series": series,
    }


async def _sample(series: Series, directory: Path, launcher: int, start: Start, observer: Observer) -> None:
    """Adds one value to each series."""
    names = {int(path.name): path.read_text() for path in (directory / "processes").iterdir()} | {launcher: "launcher"}
    names |= {pid: program(pid) for pid in children(launcher) if program(pid) in SERVERS.values()}
    for pid, name in names.items():
        with contextlib.suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            series.setdefault(f"memory of {name}", []).append(pages * os.sysconf("SC_PAGE_SIZE"))
            series.setdefault(f"descriptors of {name}", []).append(len(os.listdir(f"/proc/{pid}/fd")))
    assert start.addresses is not None
    with contextlib.suppress(RedisError, OSError):
        store = Redis(unix_socket_path=start.addresses.own_valkey_path, socket_timeout=5)
        series.setdefault("keys in the store", []).append(await store.dbsize())
        series.setdefault("store bytes", []).append((await store.info("memory"))["used_memory"])
        await store.aclose()
    for kind in QUEUES:
        with contextlib.suppress(nats.errors.Error, OSError):
            series.setdefault(f"queued {kind} messages", []).append(await observer.messages(f"{RUN}-{kind}"))


def figures(found: Mapping[str, Any]) -> str:
    """Returns the result in words, with a table of Markdown."""
    grew = ", ".join(found["growing"]) if found["growing"] else "nothing"
    lines = [f"{found['hours']:g} h and {found['steps']} steps at commit {found.get('commit', 'unknown')}: {grew} grew by the rule.", ""]
    lines += ["| series | after a quarter | at the end |", "|---|---:|---:|"]
    lines += [f"| {name} | {_amount(name, first)} | {_amount(name, last)} |" for name, (first, last) in found["first_and_last"].items()]
    return "\n".join(lines)


def _amount(name: str, value: float) -> str:
    return f"{value / (1 << 20):,.1f} MiB" if name.split()[0] in ("memory", "store") else f"{value:,.0f}"


def report(found: Mapping[str, Any], *, page: bool = False) -> int:
    """Prints the result, and writes it into the page. Returns the exit code: 1 where something grew, or the run ended by itself."""
    print(figures(found))
    if page:
        results_page.put(results_page.SOAK, figures(found))
    if found["died"] is not None:
        print(f"the run ended with exit code {found['died']}; see {found['directory']}", file=sys.stderr)
    return 1 if found["growing"] or found["died"] is not None else 0


def main(hours: float, model: Path, path: Path | None, *, page: bool = False) -> int:
    """Runs it, reports, and writes JSON to ``path``. Returns the exit code of `report`."""
    found = asyncio.run(soak(hours, model))
    if path is not None:
        path.write_text(json.dumps(found) + "\n")
    return report(found, page=page)
