"""Decides which version of the weights a replica serves, and whether it serves at all.

This is the only place that holds the served version: the replica, its pushes and its catch-up change it, and `Replica` publishes it. It is
pure state, without an engine, a bus or a clock.
"""

from dataclasses import dataclass

from shared.bus.registry import ASLEEP, CATCHING_UP

NO_WEIGHTS = -1  # the version of a replica that holds no verified weights


@dataclass
class ServedVersion:
    """The state of a replica's weights.

    Invariant: `serving` is true only while the engine holds every byte of ``version``, proven by its digest, and nothing changes it. A
    replica with NO_WEIGHTS is fenced: it takes no work until a version has been loaded as a whole.

    ``version``: the version that is served. ``digest``: its digest; empty if that is not known. ``incarnation``: it grows whenever an
    earlier report about this replica's weights has become invalid. ``target``: the version that is being loaded, or None. ``received``: the
    digest of the weights that were loaded for it. ``touched``: whether the engine's parameters may have changed since ``version`` was
    served. ``asleep``: whether a colocated trainer computes on the engine's GPUs."""

    version: int = NO_WEIGHTS
    digest: str = ""
    incarnation: int = 0
    engine_is_up: bool = False
    asleep: bool = False
    catching_up: bool = False
    target: int | None = None
    received: str = ""
    touched: bool = False

    @property
    def has_weights(self) -> bool:
        return self.version != NO_WEIGHTS

    @property
    def serving(self) -> bool:
        return self.engine_is_up and self.has_weights and self.target is None and not self.asleep

    @property
    def state(self) -> str:
        """Returns the replica's state, as the registry shows it."""
        if not self.engine_is_up:
            return "starting"
        if self.asleep:
            return ASLEEP
        if self.catching_up:
            return CATCHING_UP
        if self.target is not None:
            return "updating"
        return "ready" if self.has_weights else "fenced"

    def engine_started(self) -> None:
        self.engine_is_up = True
        self.fence()

    def engine_died(self) -> None:
        self.engine_is_up = False
        self.fence()

    def fence(self) -> None:
        """Notes that the engine's weights are not to be trusted."""
        self.incarnation += 1
        self.target, self.touched = None, False
        self.lose_weights()

    def lose_weights(self) -> None:
        """Notes that the weights were released with the engine's memory."""
        self.version, self.digest = NO_WEIGHTS, ""

    def begin_update(self, version: int) -> None:
        """Notes that ``version`` is about to be loaded; nothing is served meanwhile."""
        self.target, self.received, self.touched = version, "", False

    def loaded(self, digest: str) -> None:
        """Notes that every byte of the target has been loaded; the engine's weights now have this digest."""
        self.received, self.touched = digest, True

    def compared(self, digest: str, differs: bool) -> None:
        """Notes that the target was compared with the engine's weights."""
        self.touched |= differs
        self.received = "" if differs else self.received or digest

    def serve(self, version: int, digest: str) -> None:
        """Notes that the engine holds all of ``version``, and that its digest was the right one."""
        self.version, self.digest, self.target, self.touched = version, digest, None, False
