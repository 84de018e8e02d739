"""Debian's Chromium by Playwright, and what a page did in it: its errors, and every request."""

import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, ConsoleMessage, Page, Request, Response, async_playwright

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
LAPTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
GRAVE = ("serious", "critical")
"""The impacts, in axe's words, that nobody should have to live with."""

LEFT_OUT = (
    *(
        "AimEnabled",
        "HttpsUpgrades",
        "MediaRouter",
        "NetworkTimeServiceQuerying",
        "OptimizationHints",
        "PaintHolding",
        "PreconnectToSearch",
    ),
    *("WebUIOmniboxAimPopup", "WebUIOmniboxFullPopup", "WebUIOmniboxPopup"),
)
"""Features of Chromium: what Playwright leaves out, and pages of its own for each window's address bar, half the cost of a window."""

FILLED = re.compile(r"(\S\s*){20}")
"""The text of a page that says something."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """Yields a headless browser; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", f"--disable-features={','.join(LEFT_OUT)}"]
        )
        try:
            yield browser
        finally:
            await browser.close()


NETWORK_CHANGED = "net::ERR_NETWORK_CHANGED"
"""What Chromium ends requests with when the machine gets or loses an interface, as by containers beside it."""


@dataclass
class Visit:
    """One page of a browser, and what happened in it so far.

    errors: what the console showed as an error, and what was thrown. foreign: URLs asked of any host but ``host``.
    refused: answers of 400 and above, ``status URL``.
    """

    page: Page
    host: str
    errors: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(f"thrown: {error}"))
        self.page.on("dialog", self._dialog)
        self.page.on("request", self._request)
        self.page.on("response", self._response)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.endswith(NETWORK_CHANGED):
            self.errors.append(message.text)

    async def _dialog(self, dialog: Any) -> None:
        self.errors.append(f"a dialog: {dialog.message}")
        await dialog.dismiss()

    def _request(self, request: Request) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob", "about") and parts.netloc != self.host:
            self.foreign.append(request.url)

    def _response(self, response: Response) -> None:
        if response.status >= 400:
            self.refused.append(f"{response.status} {response.url}")

    async def go(self, where: str) -> None:
        """Opens a view of the page by its address's hash, as a link does. where: such as ``samples?step=3``."""
        await self.page.evaluate("where => { location.hash = '#/' + where }", where)

    async def filled(self, timeout_ms: float) -> None:
        """Waits until the page says something, if only what will appear in it."""
        await self.page.locator("main .page").filter(has_text=FILLED).wait_for(timeout=timeout_ms)

    async def settled(self, quiet_ms: int = 300) -> None:
        """Waits until nothing in the page has changed for a while, at most ten times as long: a live page may never come to rest."""
        await self.page.evaluate(_SETTLED, quiet_ms)

    def assert_clean(self) -> None:
        """Asserts that nothing went wrong in the page and nothing left the host."""
        assert not self.foreign, self.foreign
        assert not self.refused, self.refused
        assert not self.errors, self.errors

    async def grave_faults(self) -> list[str]:
        """Returns what axe finds against the accessibility of what is shown: rule, advice, and where."""
        found = await Axe().run(self.page)
        return [
            f"{fault['id']} ({fault['impact']}): {fault['help']}: {[node['html'][:200] for node in fault['nodes'][:3]]}"
            for fault in found.response["violations"]
            if fault["impact"] in GRAVE
        ]

    async def overflows(self) -> list[str]:
        """Returns the elements that make the page wider than its window, which then scrolls sideways."""
        found: list[str] = await self.page.evaluate(_WIDE)
        return found


_SETTLED = """(quiet) => new Promise((done) => {
  const finish = () => { observer.disconnect(); done(); };
  let timer = setTimeout(finish, quiet);
  const observer = new MutationObserver(() => { clearTimeout(timer); timer = setTimeout(finish, quiet); });
  observer.observe(document.body, { childList: true, subtree: true, characterData: true });
  setTimeout(finish, 10 * quiet);
})"""

_WIDE = """() => {
  const width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= width + 1) return [];
  const wide = [...document.body.querySelectorAll("*")].filter((one) => one.getBoundingClientRect().right > width + 1);
  const words = wide.slice(0, 8).map((one) => one.outerHTML.slice(0, 160));
  return ["the page is " + document.documentElement.scrollWidth + " px wide", ...words];
}"""
