"""Begins a reader's pushes as soon as their source announces them, before anybody has asked the reader to.

The request to receive a push takes some milliseconds from the trainer to an engine's rank: over the bus, the rollout service and a
socket. The source's own word is there sooner, and the first buckets travel meanwhile. A push that nobody asks for after it has begun would
occupy the GPU for as long as its broadcasts wait: then the reader gives up the channel.
"""

import threading
from collections.abc import Callable

from shared.runtime.errors import MyxoError
from shared.runtime.tasks import SupervisedThread
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.channel_store import StoreFollower

CLAIM_SECONDS = 10.0
"""The longest that a push which has begun may wait until somebody asks for it: a rollout service has as long for a step of its own."""


class PushFollower:
    """Follows one channel's source, on a thread. The constructor raises RuntimeError where that cannot be reached.

    Args:
        begin: called with a manifest's id and the push's seconds; begins it and returns whether it could. give_up: called with the reason
            where a push has begun that nobody will ask for. seconds: to connect.
    """

    def __init__(
        self, address: WeightChannelAddress, begin: Callable[[str, float], bool], give_up: Callable[[str], None], seconds: float
    ) -> None:
        self._name, self._begin, self._give_up = address.name, begin, give_up
        self._store = StoreFollower(address.address, address.port, address.secret, seconds)
        self._lock = threading.Lock()
        self._asked_for = -1  # the newest push that somebody has asked for
        self._begun: int | None = None  # the push that has begun and that nobody has asked for
        SupervisedThread(self._follow, f"follow-{address.name}").start()

    def claim(self, push: int) -> bool:
        """Notes that somebody asks for a push. Returns whether it has begun; otherwise it never will by itself."""
        with self._lock:
            begun, self._begun = self._begun, None
            self._asked_for = max(self._asked_for, push)
            return begun == push

    def close(self) -> None:
        """Ends the following, soon."""
        self._store.close()

    def _follow(self) -> None:
        while True:
            try:
                said = self._store.heard(None if self._begun is None else CLAIM_SECONDS)
            except TimeoutError:
                if self._begun is None:  # it was asked for meanwhile
                    continue
                break
            if said is None:
                break
            self._announced(*said)
        with self._lock:
            push, self._begun = self._begun, None
        if push is not None:
            self._give_up(f"push {push} has begun over channel {self._name}, and nobody asks this engine to receive it")

    def _announced(self, push: int, manifest: str, seconds: float) -> None:
        with self._lock:
            try:
                if self._begun is None and push > self._asked_for and self._begin(manifest, seconds):
                    self._begun = push
            except (MyxoError, RuntimeError):
                pass  # whoever asks for the push meets the same
