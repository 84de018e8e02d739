"""A reward whose names and errors are text that a careless page would run, or be turned around by."""

import asyncio
import zlib
from typing import Any

from shared.hooks import Arguments, HookSample

SCRIPT = "<img src=x onerror='window.stolen = 1'>"
TURNED = "\u202eright to left\u202c \u05e9\u05dc\u05d5\u05dd \x1b[31mred\x1b[0m \x00\u200b"
LONG = "a_name_that_is_longer_than_any_column_of_any_table_on_any_page"
PARTS = (SCRIPT, "\u0637\u0648\u0644 \u05d0\u05d5\u05e8\u05da", LONG, "plain")


PAUSE_SECONDS = 4.0
"""The time that a reward takes, so that a run of a tiny model lasts as long as somebody looks at it, and leaves them the processor."""


async def foreign(args: Arguments, sample: HookSample, **_: Any) -> dict[str, Any]:
    """Returns named rewards for most samples; one sample in sixty or so raises an error."""
    await asyncio.sleep(PAUSE_SECONDS)
    drawn = zlib.crc32(sample.response.encode())
    if drawn % 61 == 0:
        raise ValueError(f"{SCRIPT} {TURNED}")
    return {"reward": drawn % 5 / 4, **{name: (drawn >> shift) % 8 / 7 for shift, name in enumerate(PARTS)}}
