"""A service's status as displays take it: whatever the service wrote, each text is one safe line, and each count is a number or absent."""

import math
from collections.abc import Mapping

from shared.runtime.safe_text import printable_line
from shared.schema.service_messages import Doing, ServiceStatus

LONGEST_NAME = 64
"""Characters of a name: of an instance, a state, a gauge."""

LONGEST_TEXT = 1000
"""Characters of any other text."""

MOST_GAUGES = 512
"""Gauges that are looked at."""

MOST_DOING = 16
"""Things that a service does at once, and instances that one of them waits for, that are looked at."""

_TEXTS = {"detail", "held_back", "last_error", "http"}


def shown(status: ServiceStatus) -> ServiceStatus:
    """Returns the status with every text fit for a line of a display."""
    texts = {
        name: printable_line(value, LONGEST_TEXT if name in _TEXTS else LONGEST_NAME) for name, value in status if isinstance(value, str)
    }
    gauges = {printable_line(name, LONGEST_NAME): value for name, value in list(status.gauges.items())[:MOST_GAUGES]}
    return status.model_copy(update={**texts, "gauges": gauges, "doing": [_shown_doing(item) for item in status.doing[:MOST_DOING]]})


def _shown_doing(item: Doing) -> Doing:
    names = [printable_line(name, LONGEST_NAME) for name in item.awaited_from[:MOST_DOING]]
    since = item.since if math.isfinite(item.since) else 0.0
    what, follows = printable_line(item.what, LONGEST_TEXT), printable_line(item.next_action, LONGEST_TEXT)
    return item.model_copy(update={"what": what, "next_action": follows, "awaited_from": names, "since": since})


def count(gauges: Mapping[str, float], name: str, otherwise: int = 0) -> int:
    """Returns a gauge that other figures are derived from as a whole number; ``otherwise`` where it is absent or not finite."""
    value = gauges.get(name, float(otherwise))
    return int(value) if math.isfinite(value) else otherwise
