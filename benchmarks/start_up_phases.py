"""The phases of a run's start, by the logs of its launcher, its services and its engine. Pure but for `milestones`, which reads them."""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

EVENTS = {
    "launcher.log": {"launch_begun": "launcher", "servers_started": "servers", "service_started": "services"},
    "rollout-0.log": {"engine_starting": "engine process", "engine_ready": "engine", "first_tokens": "first tokens"},
    "trainer-0.log": {"model_loading": "trainer imports", "model_loaded": "trainer", "weights_pushed": "first push"},
}
"""Log → event, of which the first counts → milestone."""

ENGINE_LINES = {
    "engine: arguments": re.compile(r"server_args="),
    "engine: scheduler": re.compile(r"Init torch distributed begin"),
    "engine: distributed": re.compile(r"Init torch distributed ends"),
    "engine: weights begin": re.compile(r"Load weight begin"),
    "engine: weights": re.compile(r"Load weight end"),
    "engine: cache": re.compile(r"KV Cache is allocated"),
    "engine: graphs begin": re.compile(r"Capture .*graph.* begin|Capture .*graph bs", re.IGNORECASE),
    "engine: graphs": re.compile(r"Capture .*graph.* end", re.IGNORECASE),
    "engine: listening": re.compile(r"Uvicorn running|Application startup complete"),
}
"""Milestone → what SGLang logs then. Of those with a beginning the first line counts, of `LAST` the last one."""

LAST = ("engine: graphs",)

WAYS = {
    "launcher's imports and checks": ("start", "launcher"),
    "NATS and Valkey": ("launcher", "servers"),
    "services begun": ("servers", "services"),
    "rollout service's imports": ("services", "engine process"),
    "engine: imports": ("engine process", "engine: arguments"),
    "engine: scheduler's imports": ("engine: arguments", "engine: scheduler"),
    "engine: process group": ("engine: scheduler", "engine: weights begin"),
    "engine: weights": ("engine: weights begin", "engine: weights"),
    "engine: cache, backends": ("engine: weights", "engine: graphs begin"),
    "engine: CUDA graphs, kernels": ("engine: graphs begin", "engine: graphs"),
    "engine: until it answers": ("engine: graphs", "engine"),
    "trainer: imports": ("services", "trainer imports"),
    "trainer: model": ("trainer imports", "trainer"),
    "first push": ("engine and trainer", "first push"),
    "first tokens": ("first push", "first tokens"),
}
"""Phase → the milestones at which it begins and ends. The trainer's lie beside the engine's."""

_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")


def milestones(logs: Path, start: float, offset: float) -> dict[str, float]:
    """Returns when each milestone was reached, in seconds since ``start`` (seconds since the epoch). Earlier lines are another run's.

    Args:
        offset: of the engine's clock, seconds to be taken from its local time to have UTC. Its lines tell whole seconds.
    """
    found: dict[str, float] = {"start": 0.0}
    for name, wanted in EVENTS.items():
        for event in _events(logs / name):
            if (milestone := wanted.get(event.get("event", ""))) is None:
                continue
            if (at := datetime.fromisoformat(event["timestamp"]).timestamp() - start) >= 0:
                found.setdefault(milestone, at)
    found |= {name: seconds for name, seconds in engine_milestones(_lines(logs / "rollout-0-engine.log"), start + offset).items()}
    if {"engine", "trainer"} <= found.keys():
        found["engine and trainer"] = max(found["engine"], found["trainer"])
    return {name: round(seconds, 2) for name, seconds in found.items()}


def engine_milestones(lines: Iterator[str], start: float) -> dict[str, float]:
    """Returns the milestones that an engine's log tells of. ``start``: in the clock of its lines."""
    found: dict[str, float] = {}
    for line in lines:
        if (stamp := _STAMP.match(line)) is None:
            continue
        if (at := datetime.fromisoformat(f"{stamp[1]}+00:00").timestamp() - start) < -1:  # whole seconds
            continue
        for name, sign in ENGINE_LINES.items():
            if sign.search(line) and (name not in found or name in LAST):
                found[name] = at
    return found


def phases(reached: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of each of `WAYS` of which both ends were seen. The parts of an engine without graphs are one."""
    ways = dict(WAYS)
    if "engine: graphs" not in reached:
        ways["engine: cache, backends"] = ("engine: weights", "engine")
    return {name: round(reached[end] - reached[begin], 2) for name, (begin, end) in ways.items() if {begin, end} <= reached.keys()}


def _lines(log: Path) -> Iterator[str]:
    yield from log.read_text(errors="replace").splitlines() if log.exists() else ()


def _events(log: Path) -> Iterator[dict[str, Any]]:
    for line in _lines(log):
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
