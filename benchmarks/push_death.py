"""A death inside a push: one of two engines is killed between its first and its last bucket, and comes back.

Figures, seconds from the kill. ``named``: until the push had ended and said of whom, ``failure`` with which words. ``served``: until the
other replica served that version, by a push over channels of its own. ``engine_up``: until the dead replica's service had an engine again.
``joined``: until that engine served the version, which it took from the other engine, over channels of their own: ``peer_bytes`` in
``peer_seconds``, from the offer to the resumed engine.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.example_run import lines
from services.trainer.weights.push_record import RECEIVE
from shared.bus import streams
from shared.runtime.process_watch import descendants
from shared.schema.weight_messages import WeightsPushed

if TYPE_CHECKING:
    from services.trainer.control_client import ControlClient
    from services.trainer.weights.pusher import Pusher
    from tests.support.pushing import Replicated

SURVIVOR, VICTIM = "rollout-0", "rollout-1"
SECONDS = 300.0
"""The longest wait for anything here."""

INTO_THE_PUSH_S = 0.006
"""From when the replicas are asked to receive until the kill: the first buckets have come, and of 8 GB the last has not."""

LOOK_INTERVAL_S = 0.0002


def death_in_a_push(stage: "Replicated", pusher: "Pusher", push: Callable[[], Sequence[Any]]) -> dict[str, Any]:
    """Returns the figures. Raises SystemExit where something did not come.

    Args:
        push: makes a push of the next version to whoever is behind. Returns the results of those that succeeded.
    """
    before = stage.cards()[VICTIM]
    killer = Killer(stage.replicas[VICTIM].process.pid, pusher)
    killer.start()
    end = time.monotonic() + SECONDS
    while not (ended := [result for result in push() if SURVIVOR in result.replicas]):
        if time.monotonic() > end:
            raise SystemExit(f"{SURVIVOR} took no push within {SECONDS:g} s, {VICTIM}'s engine being dead")
    if VICTIM in ended[-1].replicas or killer.at is None:
        raise SystemExit(f"{VICTIM}'s engine did not die inside the push of version {ended[-1].version}")
    version, figures = ended[-1].version, {"served": round(time.monotonic() - killer.at, 3), **_named(stage.link, killer.at_epoch)}

    def until(what: str, condition: Callable[[Any], bool]) -> float:
        stage.until(what, lambda cards: VICTIM in cards and condition(cards[VICTIM]), SECONDS, fragile=False)
        return round(time.monotonic() - (killer.at or 0.0), 3)

    figures["engine_up"] = until("the killed engine's successor", lambda card: card.incarnation != before.incarnation)
    figures["joined"] = until("its weights", lambda card: card.version == version)
    return figures | _peer_transfer(stage.replicas[VICTIM].log)


class Killer(threading.Thread):
    """Waits for a push and kills, in its midst, all processes below a service's.

    Attributes:
        at, at_epoch: when it has killed them, monotonic seconds and seconds since the epoch; None, 0 before that.
    """

    def __init__(self, service: int, pusher: "Pusher") -> None:
        super().__init__(daemon=True)
        self._pusher, self._engine = pusher, [one.pid for one in descendants(service) if one.pid != service]
        self.at: float | None = None
        self.at_epoch = 0.0

    def run(self) -> None:
        end = time.monotonic() + SECONDS
        while (wait := self._pusher.awaited) is None or wait.step != RECEIVE:
            if time.monotonic() > end:
                return
            time.sleep(LOOK_INTERVAL_S)
        time.sleep(INTO_THE_PUSH_S)
        self.at, self.at_epoch = time.monotonic(), time.time()
        for process in self._engine:
            os.kill(process, signal.SIGKILL)


def _named(link: "ControlClient", killed: float) -> dict[str, Any]:
    """What the pushes since the kill have told of the dead replica."""
    names = link.service.subjects

    async def pushes() -> list[WeightsPushed]:
        subject = names.event("weights", "pushed")
        return [event async for _, event in streams.read(link.service.bus, names.events_stream, WeightsPushed, subject)]

    for event in link.call(pushes(), SECONDS):
        for part in event.replicas:
            if event.at > killed and part.replica == VICTIM and part.failure:
                return {"named": round(event.at - killed, 3), "failure": part.failure}
    raise SystemExit(f"no push has told why {VICTIM} does not serve its version")


def _peer_transfer(log: Path) -> dict[str, Any]:
    """What the replica's newest catching up, by its log, came to."""
    told = [line for line in lines(log) if line["event"] == "caught_up"]
    if not told or told[-1]["source"] != "peer":
        raise SystemExit(f"{VICTIM} has its weights from elsewhere than {SURVIVOR}: {told[-1:]}")
    return {"peer_bytes": told[-1]["bytes"], "peer_seconds": told[-1]["seconds"]}
