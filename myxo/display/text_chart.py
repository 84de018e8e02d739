"""A curve in a terminal: columns of block characters over steps."""

import math
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█"
"""A cell that is filled by so many eighths."""


def text_chart(values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Returns ``height`` lines and an axis. The columns stand on 0, or on the lowest value where it is below.

    Args:
        values: one a step; a column is the mean of those in its part of the steps. What is no number is left out; a column without any
            number stays empty, and without any at all there are no lines.
        width: columns at most. height: lines.
    """
    columns = [_mean(part) for part in _parts(values, width)]
    numbers = [value for value in columns if math.isfinite(value)]
    if not numbers:
        return []
    low, high = min(0.0, *numbers), max(numbers)
    scale = 8 * height / ((high - low) or 1.0)
    eighths = [max(1, round((value - low) * scale)) if math.isfinite(value) else 0 for value in columns]
    labels = {0: "" if high == low else f"{high:.3g}", height - 1: f"{low:.3g}"}
    room = max(map(len, labels.values()))
    lines = []
    for line in range(height):
        below = 8 * (height - 1 - line)
        cells = "".join(BLOCKS[min(max(filled - below, 0), 8)] for filled in eighths)
        lines.append(f"{labels.get(line, ''):>{room}} ┤{cells}".rstrip())
    return [*lines, f"{'':{room}}  {_axis(len(values), len(columns))}"]


def _parts(values: Sequence[float], most: int) -> list[Sequence[float]]:
    count = min(len(values), most)
    return [values[len(values) * index // count : len(values) * (index + 1) // count] for index in range(count)]


def _mean(values: Sequence[float]) -> float:
    numbers = [value for value in values if math.isfinite(value)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def _axis(steps: int, columns: int) -> str:
    """Returns the first and the last step, each under its column where there is room."""
    first, last = "step 1", str(steps)
    return first if steps == 1 else f"{first}{last:>{max(columns - len(first), len(last) + 1)}}"
