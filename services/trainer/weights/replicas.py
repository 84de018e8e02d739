"""Which replicas are to be pushed to: what each one has confirmed, and who has failed lately. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.bus.registry import CATCHING_UP
from shared.schema.messages import ServiceStatus

BACK_OFF_SECONDS = 1.0
BACK_OFF_MOST = 60.0
"""A replica that failed a push is offered the next one after 1, 2, 4, … seconds, 60 at most."""


@dataclass(frozen=True, order=True)
class Target:
    """A replica to push to: its name, which life of its engine's weights, and the engine's ranks in a group."""

    instance: str
    incarnation: str
    ranks: int


class Replicas:
    """What a trainer knows of the replicas beside their cards."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[str, int]] = {}  # instance → (incarnation, version) that it confirmed to us
        self._failures: dict[str, tuple[str, int, float]] = {}  # instance → (life of its process, in a row, not before)

    def behind(self, cards: Iterable[ServiceStatus], version: int, now: float) -> tuple[Target, ...]:
        """Those that do not serve ``version`` yet and may be offered it now. ``now``: monotonic seconds."""
        found = [card for card in cards if card.state != CATCHING_UP and self._is_behind(card, version, now)]
        return tuple(sorted(Target(card.instance, card.incarnation, card.ranks) for card in found))

    def _is_behind(self, card: ServiceStatus, version: int, now: float) -> bool:
        served = card.version
        incarnation, confirmed = self._served.get(card.instance, ("", -1))
        if incarnation == card.incarnation:  # the card may be older than the commit; a fenced replica has a new incarnation
            served = max(served, confirmed)
        blamed, _, not_before = self._failures.get(card.instance, ("", 0, 0.0))
        return served < version and (now >= not_before or blamed != _life(card.incarnation))

    def confirmed(self, targets: Iterable[Target], version: int) -> None:
        """These serve a version."""
        for target in targets:
            self._served[target.instance] = (target.incarnation, version)
            self._failures.pop(target.instance, None)

    def forget(self, names: Iterable[str]) -> None:
        """What these serve is not known any more."""
        for name in names:
            self._served.pop(name, None)

    def blame(self, targets: Iterable[Target], now: float) -> None:
        """These are not offered anything for a while, longer each time; a new process of that name begins without blame."""
        for target in targets:
            life, count, _ = self._failures.get(target.instance, ("", 0, 0.0))
            count = count + 1 if life == _life(target.incarnation) else 1
            pause = min(BACK_OFF_MOST, BACK_OFF_SECONDS * 2 ** (count - 1))
            self._failures[target.instance] = (_life(target.incarnation), count, now + pause)


def _life(incarnation: str) -> str:
    """Of the process: what follows counts its engine's losses of weights."""
    return incarnation.partition(".")[0]


def guilty(members: Sequence[Target], answers: Mapping[str, str | None], failures: Mapping[str, str]) -> dict[str, str]:
    """Whom a broken push is put down to, and why.

    A channel that breaks fails every member of its group, and those that live say so; whoever says nothing has broken it.

    Args:
        answers: instance → what went wrong there as it told; None: it has not answered. failures: instance → why it counts as gone.
    """
    if failures:
        return dict(failures)
    silent = {target.instance: "it did not answer" for target in members if answers.get(target.instance) is None}
    return silent or {target.instance: answers[target.instance] or "" for target in members}


def is_gone(target: Target, cards: Mapping[str, ServiceStatus]) -> str | None:
    """Why a member of a push counts as gone, by the registry; None while it lives."""
    card = cards.get(target.instance)
    if card is None:
        return "its heartbeat has stopped"
    if card.incarnation != target.incarnation:
        return "its engine has lost its weights"
    return None
