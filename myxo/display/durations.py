"""Times as people read them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """For people: 45s, 2m10s, 3h05m."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
