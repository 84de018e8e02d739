"""The terminal's output: tables, pages, progress, the picture of the reward, and the console that every command prints on."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shared.runtime.safe_text import printable


class SafeConsole(Console):
    """A console that reads no markup in strings and spells out what is unsafe to print; rich's own control codes stay."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"highlight": False, "markup": False, "emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of a renderable, each with safe text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
