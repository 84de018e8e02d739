"""The documentation's pictures of the console: `pytest --pictures tests/e2e/test_console_pictures.py` takes them anew, of a quick start."""

import asyncio
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image
from playwright.async_api import Page, expect

from tests.e2e.launched import ROOT, LaunchedRun, gauge
from tests.e2e.live_console import SHOWN_MS, LiveConsole, console_of
from tests.support.browser import chromium

pytestmark = [pytest.mark.browser, pytest.mark.timeout(3600)]

PICTURES = ROOT / "docs" / "pictures"
SIZE = {"width": 1280, "height": 800}
COLOURS = 96
"""Of a picture's palette: more would make the files larger, and no prettier."""

STEPS = 25
"""So many of the quick start's 60 are trained when the pictures are taken."""

FLAGS = ("--console", "--eval-interval", "5", "--keep-rollouts-tokens")


@pytest_asyncio.fixture
async def learning(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[LiveConsole]:
    """The quick start, in the middle of its work."""
    if not request.config.getoption("--pictures"):
        pytest.skip("the pictures are taken with --pictures")
    data = tmp_path / "data"
    subprocess.run([sys.executable, "examples/arithmetic/prepare.py", str(data)], cwd=ROOT, check=True)
    config = tmp_path / "quickstart.toml"
    text = (ROOT / "examples/arithmetic/quickstart.toml").read_text().replace("runs/quickstart/data", str(data))
    config.write_text(text.replace("[run]", f'[run]\ndir = "{tmp_path}/runs"'))
    async with chromium() as browser:
        with LaunchedRun(config, tmp_path / "runs" / "quickstart", "quickstart", FLAGS) as run:
            await asyncio.to_thread(run.until, f"{STEPS} steps", lambda cards: gauge(cards, "buffer", "trained_steps") >= STEPS, 1800)
            yield console_of(run, browser)


async def test_pictures_of_the_console(learning: LiveConsole) -> None:
    for ending, scheme in (("", "light"), ("-dark", "dark")):
        async with learning.page("run", SIZE, scheme) as visit:
            page = visit.page
            await page.locator("figure.chart .u-over").first.wait_for(timeout=SHOWN_MS)
            await visit.settled(800)
            await take(page, f"console-run{ending}")
            await visit.go("flow")
            await expect(page.locator(".verdict")).to_be_visible(timeout=SHOWN_MS)
            await visit.settled(800)
            await take(page, f"console-flow{ending}")
            await visit.go(f"samples?step={STEPS - 5}")
            await page.locator("main tbody a[href*='#/samples/']").first.click(timeout=SHOWN_MS)
            await page.wait_for_url(re.compile(r"#/samples/g\d+$"), timeout=SHOWN_MS)
            await page.locator("main tbody a[href*='#/samples/']").first.click(timeout=SHOWN_MS)
            await expect(page.locator("main .tokens .token").first).to_be_visible(timeout=SHOWN_MS)
            await visit.settled(800)
            await take(page, f"console-sample{ending}", 660)


async def take(page: Page, name: str, height: int = SIZE["height"]) -> None:
    """Writes what the window shows, down to ``height`` pixels, with few colours."""
    path: Any = PICTURES / f"{name}.png"
    await page.screenshot(path=path, clip={"x": 0, "y": 0, "width": SIZE["width"], "height": height})
    Image.open(path).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
