"""The console that ``myxo up`` starts beside a run, and a browser to look at it."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from playwright.async_api import Browser

from tests.e2e.launched import LaunchedRun
from tests.support.browser import LAPTOP, Visit

SECONDS = 120
"""The time that something may take to show on a slow and busy machine."""

SHOWN_MS = 1000 * SECONDS


@dataclass
class LiveConsole:
    """A run and the browser that looks at it. host: ``address:port`` of the console; token: what opens it."""

    run: LaunchedRun
    browser: Browser
    host: str
    token: str

    @asynccontextmanager
    async def page(self, where: str = "", size: dict[str, int] = LAPTOP, scheme: Any = "light") -> AsyncIterator[Visit]:
        """Opens the console as its printed address does, then the page ``where``, as `samples/g00000001`. Asserts a clean visit."""
        context = await self.browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")  # type: ignore[arg-type]
        try:
            visit = Visit(await context.new_page(), self.host)
            await visit.page.goto(f"http://{self.host}/?token={self.token}")
            await visit.go(where)
            yield visit
            visit.assert_clean()
        finally:
            await context.close()


def console_of(run: LaunchedRun, browser: Browser) -> LiveConsole:
    """Returns the console whose address the launcher has printed."""
    found = re.search(r"http://\S+/\?token=\S+", run.output.read_text())
    assert found, run.said()
    address = urlsplit(found[0])
    return LiveConsole(run, browser, address.netloc, parse_qs(address.query)["token"][0])
