"""A case's figures out of its run's files, what is wrong with them, and the table."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.example_run import at, lines, middle
from benchmarks.gpu_runs.engine_deaths import EngineDeath
from benchmarks.gpu_runs.layout_case import LAYOUT_CASES, LayoutCase

LARGEST_DIFFERENCE, LARGEST_OF_EIGHT_BITS = 5e-3, 0.1
"""Of engine's and trainer's log-probs at equal versions, in the mean; both compute in float32, by other kernels."""

LEARNS_WITHIN = 15
"""Steps after which a run on GPUs answers better than before; on a CPU its model has seen too few demonstrations."""

SEEN_LATE_S = 0.5
"""A replica's log may tell of its weights so much later than its status: well before it dies again."""

INTERRUPTED = 130
"""The exit code of a run that was told to end (SIGINT)."""

OF_SUMMARY = (
    *("steps", "finished", "audit", "accuracy_before", "accuracy_after", "reward_first", "reward_last", "mean_abs_logprob_diff"),
    *("max_staleness", "max_staleness_seen", "trained_tokens", "wall_seconds", "restarts"),
)


def run_figures(root: Path) -> dict[str, Any]:
    """Returns the figures of a run, so far or at its end. What is not there is None.

    Args:
        root: its directory.
    """
    summary = json.loads(file.read_text()) if (file := root / "summary.json").exists() else {}
    replicas = {log.stem: lines(log) for log in sorted((root / "logs").glob("rollout-*.log")) if not log.stem.endswith("engine")}
    return {
        **{name: summary.get(name) for name in OF_SUMMARY},
        "pushes": push_figures(lines(root / "logs" / "trainer-0.log")),
        "catch_ups": catch_ups(replicas),
        "adapter_bytes": adapter_bytes(root / "hf" / "adapter"),
        "critic_checkpoints": len(list((root / "critic-checkpoints").glob("step_*"))),
    }


def push_figures(trainer: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the figures of the pushes in a trainer's log.

    ``seconds``, ``wire_seconds``: medians. ``bytes``: of the largest. ``digests``: versions of different weights among them. ``failed``:
    those that failed, for some replicas at least, with why.
    """
    told = list(trainer)
    pushed = [line for line in told if line["event"] == "weights_pushed"]
    failed = [line for line in told if line["event"] == "push_failed"]
    return {
        "count": len(pushed),
        "replicas": max((len(line["replicas"]) for line in pushed), default=0),
        "seconds": middle(line["seconds"] for line in pushed),
        "wire_seconds": middle(line["wire_seconds"] for line in pushed),
        "bytes": max((line["bytes"] for line in pushed), default=0),
        "digests": len({line["digest"] for line in pushed}),
        "failed": [{name: line[name] for name in ("version", "step", "replicas")} for line in failed],
    }


def catch_ups(replicas: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns what replicas took from elsewhere than a push, in their logs. Args: replicas: instance → lines of its log."""
    names = ("source", "replica", "version", "backend", "bytes", "seconds")
    return [
        {"by": instance, "at": at(line), **{name: line.get(name) for name in names}}
        for instance, told in replicas.items()
        for line in told
        if line["event"] == "caught_up"
    ]


def adapter_bytes(directory: Path) -> int | None:
    """Returns the bytes of the tensors of the final policy's adapters; None where it has none."""
    files = sorted(directory.glob("*.safetensors"))
    return sum(_tensor_bytes(file) for file in files) if files else None


def _tensor_bytes(file: Path) -> int:
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    return file.stat().st_size - 8 - header


def death_figures(death: EngineDeath, victim: str, trainer: Sequence[dict[str, Any]], replica: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns what came of one death.

    ``push``: what it says of the victim: ``failed`` with its step and reason, ``held`` (it had taken all before it died), or ``unknown``.
    ``named_after``: seconds until a log names the victim, ``named_by``: whose. ``back_after``: until it served again. ``source``: where it
    had its weights from: a peer, or the trainer's push. Args: trainer, replica: lines of their logs.
    """
    named = {
        "trainer-0": (line for line in trainer if line["event"] == "push_failed" and victim in line["replicas"]),
        victim: (line for line in replica if line["event"] == "fenced"),
    }
    times = {who: min((at(line) for line in told if at(line) >= death.at), default=None) for who, told in named.items()}
    first = min(((when, who) for who, when in times.items() if when is not None), default=(None, None))
    began = [at(line) for line in replica if line["event"] == "engine_starting" and at(line) > death.at]
    until = death.at + (0.0 if death.back_after is None else death.back_after + SEEN_LATE_S)
    joined = [line for line in catch_ups({victim: list(replica)}) if death.at < line["at"] <= until][:1]
    own = [part for part in death.push.replicas if part.replica == victim] if death.push is not None else []
    return {
        **{name: value for name, value in asdict(death).items() if name != "push"},
        "push": "unknown" if not own else "failed" if own[0].failure else "held",
        "reason": own[0].failure if own else "",
        "others_held": [part.replica for part in death.push.replicas if not part.failure] if death.push is not None else [],
        "push_seconds": round(death.push.seconds, 3) if death.push is not None else None,
        "named_after": None if first[0] is None else round(first[0] - death.at, 2),
        "named_by": first[1],
        "engine_began_after": round(began[0] - death.at, 1) if began else None,
        "source": joined[0]["source"] if joined else "trainer" if death.back_after is not None else None,
        "join": joined[0] if joined else None,
    }


def problems(case: LayoutCase, row: dict[str, Any]) -> list[str]:
    """Returns what is wrong with a case's run that has ended, in words. Args: row: its figures, with ``steps_asked`` and ``deaths``."""
    pushes, difference, before, after = row["pushes"], row["mean_abs_logprob_diff"], row["accuracy_before"], row["accuracy_after"]
    most = LARGEST_OF_EIGHT_BITS if case.block else LARGEST_DIFFERENCE
    learns = row["device"] == "cuda" and row["steps_asked"] >= LEARNS_WITHIN and not case.killed
    expected = INTERRUPTED if case.killed else 0
    found = {
        f"it ended with {row['exit']}, not {expected}": row["exit"] != expected,
        f"audit: {row['audit']}": row["audit"] != "ok",
        f"{row['steps']} of {row['steps_asked']} steps": not case.killed and row["steps"] != row["steps_asked"],
        f"engine and trainer differ by {difference}": difference is None or difference > most,
        "all its versions have the same weights": pushes["digests"] < 2,
        f"a push failed: {pushes['failed']}": bool(pushes["failed"]) and not case.killed,
        f"pushes of {pushes['bytes']} bytes, adapters have {row['adapter_bytes']}": case.adapters
        and pushes["bytes"] != row["adapter_bytes"],
        f"it has not learned: {before} of the held-out answers were right, then {after}": learns and not (after or 0.0) > (before or 0.0),
        "its critic has saved nothing": case.critic and not row["critic_checkpoints"],
    }
    return [words for words, holds in found.items() if holds] + (_death_problems(row) if case.killed else [])


def _death_problems(row: dict[str, Any]) -> list[str]:
    deaths, backend = row["deaths"], "nccl" if row["device"] == "cuda" else "gloo"
    joins = [death["join"] for death in deaths if death["source"] == "peer"]
    found = {
        row["deaths_problem"]: bool(row["deaths_problem"]),
        "no engine was killed": not deaths,
        "no death was inside a push: each had ended well": bool(deaths) and all(death["push"] != "failed" for death in deaths),
        f"a peer's weights came over {[join['backend'] for join in joins]}, not {backend}": any(
            join["backend"] != backend for join in joins
        ),
        "a replica did not serve again": any(death["back_after"] is None for death in deaths),
        "nobody named a dead engine": any(death["named_after"] is None for death in deaths),
    }
    return [words for words, holds in found.items() if holds]


# --- what is shown


def table(found: dict[str, Any]) -> str:
    """Returns the page's tables: of the runs, and of the deaths."""
    lines = [
        "| run | steps | reward, first → last | held out, before → after | log-prob, engine − trainer | staleness, largest (bound) "
        "| pushes: number, median, bytes | failed | from a peer | seconds | audit |",
        "|---" * 11 + "|",
    ]
    lines += [_line(row) for row in found["cases"]]
    deaths = [death for row in found["cases"] for death in row["deaths"]]
    if deaths:
        lines += [
            "",
            "| killed in the push of version | after | the push, to it | named after | serves again after | its weights came from |",
        ]
        lines += ["|---" * 6 + "|", *map(_death_line, deaths)]
    return "\n".join([*lines, "", f"Measured on: {found['machine']}."])


def _line(row: dict[str, Any]) -> str:
    pushes, peers = row["pushes"], sum(join["source"] == "peer" for join in row["catch_ups"])
    columns = (
        f"{row['case']}: {LAYOUT_CASES[row['case']].words}",
        row["steps"],
        f"{_number(row['reward_first'])} → {_number(row['reward_last'])}",
        f"{_number(row['accuracy_before'])} → {_number(row['accuracy_after'])}",
        _number(row["mean_abs_logprob_diff"], ".1e"),
        f"{row['max_staleness_seen']} ({row['max_staleness']})",
        f"{pushes['count']}, {_number(pushes['seconds'] and 1000 * pushes['seconds'], '.0f')} ms, {pushes['bytes'] / 1e6:.2f} MB",
        len(pushes["failed"]),
        peers,
        _number(row["seconds"], ".0f"),
        row["audit"] if not row["problems"] else "; ".join(row["problems"]).replace("|", "\\|"),
    )
    return f"| {' | '.join(map(str, columns))} |"


def _death_line(death: dict[str, Any]) -> str:
    join, back = death["join"], death["back_after"]
    took = f" ({join['version']}, {join['backend']}, {join['bytes'] / 1e6:.1f} MB in {join['seconds']:.2f} s)" if join else ""
    came = f"{death['source']}{' ' + join['replica'] if join else ''}{took}"
    named = f"{_number(death['named_after'])} s, by {death['named_by']}"
    return f"| {death['version']} | {death['killed_after_ms']:.1f} ms | {death['push']} | {named} | {_number(back, '.0f')} s | {came} |"


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else f"{value:{form}}"
