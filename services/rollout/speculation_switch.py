"""Keeps `rollout.speculation = "auto"` worth it: a replica speculates only while its tokens/s are more with speculation than without.

An engine cannot do both: it is restarted for the other. Its work is cut into windows of like load, and the rates of both ways are compared
where they have served as many requests. A first trial of plain decoding begins once the engine has worked for several times what its start
takes, and each further restart waits twice as long as the one before. Nothing is lost by one: groups in hand are stored and handed on.
"""

import asyncio
import contextlib
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.rollout.in_flight import InFlight
from services.rollout.replica import Replica
from shared.bus.bus_errors import TRANSIENT
from shared.bus.registry import ASLEEP
from shared.config.speculation import COSTS, SPECULATION_OFF, SPECULATION_ON, why_not_switched
from shared.runtime.errors import MyxoError
from shared.runtime.telemetry import declare_metrics
from shared.schema.service_messages import ServiceStatus
from shared.service.service_base import Service

declare_metrics("""
    speculation_gain | | the engine's tokens/s with speculation over those without, at like load; 1 until both are
        [measured](speculation.md#switched-off-by-itself), where `speculation` is `auto`
""")

WINDOW_SECONDS, ENOUGH, KEPT = 10.0, 6, 24  # seconds of a window; the windows at one load that are compared, at least and at most
LEAST, CERTAIN = 0.03, 3.0  # rates differ where their logarithms do by more than so much, and by more than so many standard errors
# a restart waits for the time of so many starts, at least so long, doubled at most so often
STARTS, LEAST_SECONDS, DOUBLINGS = 5.0, 60.0, 6
POLL_INTERVAL_S = 1.0
TURN_SECONDS = 30.0  # the time by the clock in whose first half a replica may begin to restart: until the next one's it is seen to be away


class RateWindow(NamedTuple):
    """``load``: the requests at once, in half octaves; ``rate``: tokens/s."""

    load: int
    rate: float


class LoadWindows:
    """Cuts the engine's work into windows of `WINDOW_SECONDS` in which the number of running requests changed by less than half."""

    def __init__(self) -> None:
        self._readings: list[tuple[float, float, int]] = []
        self._state: object = None

    def note(self, now: float, tokens: float, running: int, state: object) -> RateWindow | None:
        """Returns the window that ends at ``now`` (seconds); None while none does. ``tokens``: generated in all. ``state``: what a window
        must not see change, such as the weights."""
        if state != self._state or running < 1:
            self._readings, self._state = [], state
        if running < 1:
            return None
        self._readings.append((now, tokens, running))
        loads = [one for _, _, one in self._readings]
        if max(loads) > 2 * min(loads):
            self._readings = self._readings[-1:]
        began, before, _ = self._readings[0]
        if now - began < WINDOW_SECONDS:
            return None
        self._readings = self._readings[-1:]
        rate = (tokens - before) / (now - began)
        return RateWindow(round(2 * math.log2(statistics.fmean(loads))), rate) if rate > 0 else None


@dataclass
class SpeculationTrial:
    """Decides from windows. ``speculates``: whether the engine does now, ``since`` when; ``tries``: plain decoding is being measured."""

    speculates: bool | None = None
    since: float = 0.0
    tries: bool = False
    restarts: int = 0
    gain: float = 1.0
    _known: bool = False  # rates of both ways, at one load
    _rates: dict[bool, dict[int, deque[float]]] = field(default_factory=lambda: {True: {}, False: {}})

    def runs(self, speculates: bool, now: float) -> None:
        """Notes how the engine runs. The windows of an earlier time in which it ran so count no more: the draft has changed since."""
        if speculates != self.speculates:
            self.speculates, self.since, self._rates[speculates] = speculates, now, {}

    def note(self, window: RateWindow) -> None:
        """Takes a window of the engine as it runs now."""
        self._rates[bool(self.speculates)].setdefault(window.load, deque(maxlen=KEPT)).append(window.rate)

    def decide(self, now: float, start_seconds: float) -> str | None:
        """Returns why the engine is to be restarted the other way; None where it is not. ``start_seconds``: what a start takes."""
        words = self._by_rates() or self._by_time(now, max(STARTS * start_seconds, LEAST_SECONDS) * 2 ** min(self.restarts, DOUBLINGS))
        if words is not None:
            self.tries, self.restarts = bool(self.speculates), self.restarts + 1
        return words

    def _by_rates(self) -> str | None:
        found = self._compared()
        self._known = found is not None
        if found is None:
            return None
        (sure, measured), tried = found, self.tries
        self.tries &= bool(self.speculates)
        if self.speculates:
            return f"{COSTS}: {measured}" if sure < 0 else None
        return f"it gives more than it costs: {measured}" if tried and sure > 0 else None

    def _by_time(self, now: float, pause: float) -> str | None:
        if self.speculates is None or now - self.since < pause:
            return None
        if not self.speculates:
            return f"it is tried again after {now - self.since:.0f} s"
        measured = any(len(row) >= ENOUGH for row in self._rates[True].values())
        return "plain decoding is measured for comparison" if measured and not self._known else None

    def _compared(self) -> tuple[int, str] | None:
        """Returns whether speculation is faster (1), slower (-1) or neither for sure (0), and figures; None: no load of both is known."""
        fast, plain = self._rates[True], self._rates[False]
        loads = [load for load in fast if min(len(fast[load]), len(plain.get(load, ()))) >= ENOUGH]
        if not loads:
            return None
        weights = [min(len(fast[load]), len(plain[load])) for load in loads]
        distances, variances = [], []
        for load in loads:
            logs = [[math.log(rate) for rate in way[load]] for way in (fast, plain)]
            distances.append(statistics.fmean(logs[0]) - statistics.fmean(logs[1]))
            variances.append(sum(statistics.variance(each) / len(each) for each in logs))
        whole = sum(weights)
        distance = sum(weight * one for weight, one in zip(weights, distances, strict=True)) / whole
        error = math.sqrt(sum(weight**2 * one for weight, one in zip(weights, variances, strict=True))) / whole
        self.gain = math.exp(distance)
        load = loads[weights.index(max(weights))]
        rates = [statistics.fmean(way[load]) for way in (fast, plain)]
        figures = f"{rates[0]:,.0f} tokens/s with speculation, {rates[1]:,.0f} without, at about {2 ** (load / 2):.0f} requests"
        return (0 if abs(distance) <= max(LEAST, CERTAIN * error) else 1 if distance > 0 else -1), figures


def has_turn(instance: str, statuses: Sequence[ServiceStatus], now: float) -> bool:
    """Returns whether a replica may restart its engine: all serve and it is its turn, or all would go at once. ``now``: by the clock."""
    awake = [one for one in statuses if one.state != ASLEEP]
    names, (turn, since) = sorted({instance, *(one.instance for one in awake)}), divmod(now, TURN_SECONDS)
    return since < TURN_SECONDS / 2 and names[int(turn) % len(names)] == instance and all(one.state == "ready" for one in awake)


async def keep_worth(service: Service, replica: Replica, in_flight: InFlight, tokens: Callable[[], float]) -> None:
    """Restarts the replica's engine with speculation or without it, as `SpeculationTrial` decides. Runs until cancelled; where the run does
    not ask for it, or engines cannot be restarted, it only says so. ``tokens``: generated in all."""
    service.metrics.set("speculation_gain", 1.0)
    if service.config.rollout.speculation != "auto":
        return
    if reason := why_not_switched(service.config):
        service.log.warning("speculation_not_switched", reason=reason)
        return
    windows, trial = LoadWindows(), SpeculationTrial()
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        client, now = replica.client, time.monotonic()
        if client is None or client.load is None or not replica.serving:
            continue
        trial.runs(client.capabilities.speculates, now)
        window = windows.note(now, tokens(), client.load.running, (replica.incarnation, replica.version))
        if window is not None:
            trial.note(window)
        words = trial.decide(now, replica.start_seconds)
        service.metrics.set("speculation_gain", trial.gain)
        if words is not None:
            while True:
                with contextlib.suppress(MyxoError, *TRANSIENT):
                    alive = await service.registry.alive("rollout")
                    if has_turn(service.instance, alive, time.time()) and not replica.update_lock.locked():
                        break
                await asyncio.sleep(POLL_INTERVAL_S)
            what = SPECULATION_OFF if trial.speculates else SPECULATION_ON
            service.log.info(what, reason=words)
            await service.publish_event(what, words)
            await replica.restart(not trial.speculates, f"{what}: {words}", in_flight)
