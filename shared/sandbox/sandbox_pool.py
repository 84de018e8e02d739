"""Sandboxes that have started before they are needed. Each serves one check and is ended after it, so that none hears of another."""

import contextlib
from collections import deque
from collections.abc import Iterator

from shared.sandbox.program import SandboxSettings
from shared.sandbox.sandbox import Sandbox


class SandboxPool:
    """Keeps sandboxes that nobody has used yet. For one thread.

    Args:
        warm: how many.
    """

    def __init__(self, settings: SandboxSettings, warm: int = 1) -> None:
        self._settings, self._warm = settings, warm
        self._waiting, self._ending = deque[Sandbox](), deque[Sandbox]()

    def fill(self) -> None:
        """Starts as many as are missing, and does not wait for them. Raises SandboxUnavailable."""
        while len(self._waiting) < self._warm:
            self._waiting.append(Sandbox(self._settings))

    @contextlib.contextmanager
    def sandbox(self) -> Iterator[Sandbox]:
        """Opens a sandbox that nobody has used; it is ended with the body. Raises SandboxUnavailable."""
        found = self._unused()
        try:
            yield found
        finally:
            found.kill()
            self._ending.append(found)
            self.fill()  # the next one starts while its caller looks at the results
            while len(self._ending) > self._warm:
                self._ending.popleft().close()

    def close(self) -> None:
        """Ends all of them."""
        for group in (self._waiting, self._ending):
            while group:
                group.popleft().close()

    def _unused(self) -> Sandbox:
        while self._waiting:
            found = self._waiting.popleft()
            if found.alive:
                return found
            found.close()  # its lease ran out
        return Sandbox(self._settings)
