"""What the buffer's pure core costs: events per second on one core, memory of a group in flight, and whether either grows with the run.

``python -m benchmarks.buffer_core [--json FILE] [--groups N] [--samples N] [--lot N]`` drives `services.buffer.policy` and
`services.buffer.state` as the service does, without bus, store and clock: each event is decided, its records are folded in, and what
follows (the end of evaluations, admissions) is decided until nothing does. An event is a version gone live, one group's rewards or
failure, a request for a batch (with its answer), a step reported as trained, a checkpoint reported as durable; admissions count as part of
the event that lets them in. Messages are made outside of the measured time. Prints a table with the goal beside each figure.
"""

import argparse
import gc
import json
import os
import platform
import random
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.buffer import policy
from services.buffer.buffer_config import BufferConfig
from services.buffer.state import BufferState
from shared.config.rollout_section import RolloutSection
from shared.schema.ledger import GroupsAdmitted, LedgerRecord, group_id
from shared.schema.messages import Failed, Message, Payload, SampleMeta, Scored

EVENTS_GOAL = 50_000
"""Events per second."""

GROUP_GOAL = 2048
"""Bytes of a group in flight."""

FLAT_GOAL = 0.05
"""How much of its memory a long run may gain, and of its pace lose."""

GROUPS_PER_BATCH = 32
MAX_STALENESS = 2
SAVE_EVERY = 10
"""Steps between durable checkpoints."""

REPEATED, FAILING, STALE = 0.02, 0.01, 0.005
"""Parts of the groups that are delivered twice, fail, and come back too old for their batch."""

WINDOWS = 20
"""Figures over the run are taken so often."""

KINDS = ("live", "scored", "batch", "trained", "durable")


@dataclass
class Core:
    """The core with what surrounds it left out. ``spent``: CPU seconds by kind of event; ``events``: how many."""

    limits: BufferConfig
    state: BufferState = field(default_factory=BufferState)
    outstanding: deque[int] = field(default_factory=deque)
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    events: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))

    def take(self, kind: str, events: int, decisions: Sequence[Callable[[], Sequence[LedgerRecord]]]) -> None:
        """Takes decisions one after the other, in measured time."""
        began = time.thread_time()
        for decision in decisions:
            self._fold(decision())
            while following := [*policy.close(self.state, self.limits, 0.0), *policy.admit(self.state, self.limits, 0.0)]:
                self._fold(following)
        self.spent[kind] += time.thread_time() - began
        self.events[kind] += events

    def _fold(self, records: Sequence[LedgerRecord]) -> None:
        for record in records:
            self.state.apply(record)
            if isinstance(record, GroupsAdmitted):
                self.outstanding.extend(range(record.first, record.first + record.count))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, with samples over the run")
    parser.add_argument("--groups", type=int, default=1_000_000, metavar="N", help="groups to train (default a million)")
    parser.add_argument("--samples", type=int, default=8, metavar="N", help="samples of a group (default 8)")
    parser.add_argument("--lot", type=int, default=1, metavar="N", help="rewards decided at once (default 1, the worst; at most 256)")
    given = parser.parse_args()
    figures = measure(given.groups, given.samples, given.lot)
    Console().print(table(figures))
    if given.json:
        given.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(groups: int, samples: int, lot: int) -> dict[str, Any]:
    """All figures. ``lot``: how many rewards the service finds waiting at once."""
    # memory first: nothing is left behind then by the long run
    load, memory = os.getloadavg()[0], group_bytes(samples)
    core, windows = run(groups, samples, lot)
    spent, events = sum(core.spent.values()), sum(core.events.values())
    settled = windows[1:]  # the first holds the growth from nothing
    return {
        "measured": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores shared with other jobs (load {load:.1f} at the start), {platform.machine()}",
        "python": platform.python_version(),
        "schedule": {
            "groups": groups,
            "samples_per_group": samples,
            "groups_per_batch": GROUPS_PER_BATCH,
            "max_staleness": MAX_STALENESS,
            "rewards_at_once": lot,
            "repeated": REPEATED,
            "failing": FAILING,
            "stale": STALE,
        },
        "events": events,
        "cpu_seconds": round(spent, 3),
        "events_per_second": round(events / spent),
        "groups_per_second": round(core.state.trained / spent),
        "kinds": {
            kind: {"events": core.events[kind], "microseconds_each": round(core.spent[kind] / core.events[kind] * 1e6, 2)} for kind in KINDS
        },
        "ended": {"trained": core.state.trained, "dropped": core.state.dropped, "dead": core.state.dead},
        "group_bytes": memory,
        "rss_growth": round(settled[-1]["rss_bytes"] / settled[0]["rss_bytes"] - 1, 4),
        "pace_change": round(_pace(settled[-5:]) / _pace(settled[:5]) - 1, 4),
        "windows": windows,
        "goals": {"events_per_second": EVENTS_GOAL, "group_bytes": GROUP_GOAL, "rss_growth": FLAT_GOAL},
    }


def run(groups: int, samples: int, lot: int) -> tuple[Core, list[dict[str, Any]]]:
    """Trains ``groups`` groups; returns the core and what `WINDOWS` windows of the run took."""
    steps = max(WINDOWS, groups // GROUPS_PER_BATCH)
    limits = BufferConfig(
        RolloutSection(num_rollout=steps, rollout_batch_size=GROUPS_PER_BATCH, n_samples_per_prompt=samples, max_staleness=MAX_STALENESS)
    )
    core, dice, windows = Core(limits), random.Random(0), []
    every = steps // WINDOWS
    events, spent = 0, 0.0
    for step in range(steps):
        _step(core, limits, step, lot, dice)
        if (step + 1) % every == 0:
            now, cpu = sum(core.events.values()), sum(core.spent.values())
            pace = round((now - events) / (cpu - spent))
            state = core.state
            windows.append({"groups": state.admitted, "in_flight": state.in_flight, "rss_bytes": _rss(), "events_per_second": pace})
            events, spent = now, cpu
    core.take("durable", 1, [lambda: policy.durable(core.state, steps, 0.0)])
    assert core.state.finished_steps == steps, "the schedule did not finish the run"
    return core, windows


def _step(core: Core, limits: BufferConfig, step: int, lot: int, dice: random.Random) -> None:
    state = core.state
    core.take("live", 1, [lambda: policy.live(state, limits, step, 0.0)])
    while step not in state.batches:
        lots, failures, events = _deliveries(core, limits, step, lot, dice)
        decisions: list[Callable[[], Sequence[LedgerRecord]]] = [
            *(partial(policy.scored, state, limits, found, 0.0) for found in lots),
            *(partial(policy.failed, state, failure, 0.0) for failure in failures),
        ]
        core.take("scored", events, decisions)
        core.take("batch", 1, [lambda: _asked(core, limits, step)])
    core.take("trained", 1, [lambda: policy.trained(state, step, step + 1, 0.0, 1.0, 0.0)])
    if (step + 1) % SAVE_EVERY == 0 and step + 1 < limits.rollout.num_rollout:
        core.take("durable", 1, [lambda: policy.durable(state, step + 1, 0.0)])


def _asked(core: Core, limits: BufferConfig, step: int) -> Sequence[LedgerRecord]:
    """A request for a batch: formed if it can be, and answered."""
    core._fold(policy.form_batch(core.state, limits, step, step, 0.0))
    policy.batch(core.state, step)
    return []


def _deliveries(core: Core, limits: BufferConfig, step: int, lot: int, dice: random.Random) -> tuple[list[list[Scored]], list[Failed], int]:
    """Messages about as many outstanding groups as a batch has: rewards in lots, failures, and how many messages these are."""
    rewards: list[Scored] = []
    failures = []
    for _ in range(min(GROUPS_PER_BATCH, len(core.outstanding))):
        number = core.outstanding.popleft()
        if dice.random() < FAILING:
            failures.append(Failed(group=group_id(number), attempt=0, reason="verifier hung", by="reward-0"))
            continue
        oldest = 0 if dice.random() < STALE else max(0, step - dice.randint(0, MAX_STALENESS))
        rewards.append(scored(number, limits.rollout.n_samples_per_prompt, oldest, min(oldest + 1, step), dice))
        if dice.random() < REPEATED:
            rewards.append(rewards[-1])
    return [rewards[at : at + lot] for at in range(0, len(rewards), lot)], failures, len(rewards) + len(failures)


def scored(number: int, samples: int, oldest: int, newest: int, dice: random.Random) -> Scored:
    """Returns what a reward service sends about a group; ``oldest``, ``newest``: the versions of its tokens."""
    name = group_id(number)
    return Scored(
        group=name,
        attempt=0,
        payload=Payload(keys=[f"benchmark:group:{name}:0:0"], bytes=100_000),
        samples=[
            SampleMeta(tokens=(length := dice.randint(100, 9000)), trained=length, oldest=oldest, newest=newest, finish="stop")
            for _ in range(samples)
        ],
        rewards=[dice.random() for _ in range(samples)],
        replica="rollout-0",
        environment="math",
        started=1_700_000_000.0 + number,
        ended=1_700_000_030.0 + number,
    )


def group_bytes(samples: int, groups: int = 20_000) -> dict[str, Any]:
    """Bytes of Python objects (`tracemalloc`) that the state holds for each group in flight, outstanding and scored.

    Messages come from their bytes, as off the bus: nothing in them is shared, and nothing but the state keeps them.
    """
    limits = BufferConfig(RolloutSection(num_rollout=groups, rollout_batch_size=1, n_samples_per_prompt=samples, max_staleness=groups))
    dice, core = random.Random(0), Core(limits)
    core.outstanding = deque(maxlen=0)
    wire = [scored(number, samples, 0, 0, dice).encode() for number in range(groups)]
    gc.collect()
    tracemalloc.start()
    try:
        began = tracemalloc.get_traced_memory()[0]
        core.take("live", 1, [lambda: policy.live(core.state, limits, 0, 0.0)])
        outstanding = tracemalloc.get_traced_memory()[0] - began
        for content in wire:
            message = Message.decode(content)
            assert isinstance(message, Scored)
            core.take("scored", 1, [partial(policy.scored, core.state, limits, [message], 0.0)])
        del message
        gc.collect()
        ready = tracemalloc.get_traced_memory()[0] - began
    finally:
        tracemalloc.stop()
    assert len(core.state.ready) == groups
    return {"how": f"tracemalloc, {groups} groups", "outstanding": round(outstanding / groups), "scored": round(ready / groups)}


def table(figures: dict[str, Any]) -> Table:
    """The figures beside their goals."""
    schedule, memory = figures["schedule"], figures["group_bytes"]
    title = f"Buffer core: {schedule['groups']:,} groups of {schedule['samples_per_group']} samples"
    rows = Table(title=title, caption=figures["machine"], box=None, padding=(0, 3, 0, 0), header_style="dim")
    rows.title_justify = rows.caption_justify = "left"
    for name, justify in (("", "left"), ("measured", "right"), ("goal", "right"), ("", "left")):
        rows.add_column(name, justify=justify)
    pace, growth, held = figures["events_per_second"], figures["rss_growth"], memory["scored"]
    rows.add_row("events per second of one core (CPU time)", f"{pace:,}", f"≥ {EVENTS_GOAL:,}", _verdict(pace >= EVENTS_GOAL))
    for kind, of in figures["kinds"].items():
        rows.add_row(f"  {kind}, µs each of {of['events']:,}", f"{of['microseconds_each']:.1f}", "", "")
    rows.add_row("groups per second, admitted to durable", f"{figures['groups_per_second']:,}", "", "")
    rows.add_row("bytes a scored group in flight (tracemalloc)", f"{held:,}", f"≤ {GROUP_GOAL:,}", _verdict(held <= GROUP_GOAL))
    rows.add_row("  an outstanding one", f"{memory['outstanding']:,}", "", "")
    rows.add_row("growth of resident memory over the run", f"{growth:+.1%}", f"≤ {FLAT_GOAL:.0%}", _verdict(growth <= FLAT_GOAL))
    rows.add_row("change of pace over the run", f"{figures['pace_change']:+.1%}", "", "")
    return rows


def _pace(windows: Sequence[dict[str, Any]]) -> float:
    return sum(window["events_per_second"] for window in windows) / len(windows)


def _verdict(met: bool) -> str:
    return "[green]met[/]" if met else "[bold red]missed[/]"


def _rss() -> int:
    """Bytes of resident memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
