"""Finds an engine that no longer answers though all of its processes are there: a deadlock, or a GPU that does not go on."""

import asyncio
import time
from collections.abc import Callable

from services.rollout.engine.engine_client import EngineClient
from shared.runtime.errors import MyxoError

PROBE_INTERVAL_S = 10.0
PROBE_SECONDS = 30.0
"""The interval and the deadline of a probe: SGLang itself gives its processes 20 s to answer each other."""

HUNG_SECONDS, HUNG_PART = 60.0, 0.25
"""The time for which an engine may answer no probe, and on a CPU the part of the deadline of a generation, if that is longer: one forward
pass of a long prompt through a large model takes minutes there."""


class EngineHealth:
    """The record of one engine's probes. Pure: its caller gives the time."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._silent_since: float | None = None

    def idle(self) -> None:
        """Takes that the engine could not be asked: it is paused, asleep or being loaded."""
        self._silent_since = None

    def answered(self) -> None:
        """Takes that it has answered."""
        self._silent_since = None

    def failed(self, error: str, began: float, now: float) -> str:
        """Takes that a probe which began then has failed. Returns why the engine counts as hung; empty: it does not yet."""
        self._silent_since = began if self._silent_since is None else self._silent_since
        silent = now - self._silent_since
        return f"it has answered no probe for {silent:.0f} s, though its processes are there: {error}" if silent >= self._patience else ""


def patience(device: str, generate_timeout: float) -> float:
    """Returns the seconds for which an engine on ``cuda`` or ``cpu`` may answer no probe. ``generate_timeout``: a generation's deadline."""
    return HUNG_SECONDS if device == "cuda" else max(HUNG_SECONDS, HUNG_PART * generate_timeout)


async def until_hung(client: EngineClient, can_be_asked: Callable[[], object], seconds: float) -> str:
    """Probes an engine, and returns why once it counts as hung.

    Args:
        seconds: for which it may answer no probe.
        can_be_asked: returns what the engine serves, and nothing (or something false) while it generates for nobody; a probe counts only
            if that was the same before and after it.
    """
    health = EngineHealth(seconds)
    while True:
        await asyncio.sleep(PROBE_INTERVAL_S)
        if not (before := can_be_asked()):
            health.idle()
            continue
        began = time.monotonic()
        try:
            await client.probe(deadline=PROBE_SECONDS)
            health.answered()
        except MyxoError as error:
            if can_be_asked() != before:
                health.idle()
            elif hung := health.failed(str(error), began, time.monotonic()):
                return hung
