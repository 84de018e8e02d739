"""How long a browser shows nothing: first paint of each page of the console, and when its data stands there.

``python -m benchmarks.console_paint RUN_DIRECTORY [--visits N] [--json FILE]`` starts a console on a run's directory and visits each page N
times with Debian's Chromium, each time with an empty cache. Milliseconds since the address was entered:

- ``paint``: first contentful paint, as the browser tells it;
- ``data``: the page's own answer has come and stands in the page.
"""

import argparse
import asyncio
import secrets
import statistics
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from playwright.async_api import Browser

from benchmarks import command_line
from shared.process.embedded_servers import free_port
from tests.support.browser import FILLED, LAPTOP, chromium
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

PAGES = ("run", "flow", "weights", "samples", "health")

PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="RUN_DIRECTORY", help="the directory of a run that has ended")
    parser.add_argument("--visits", type=int, default=5, metavar="N", help="to each page (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    if not (arguments.directory / "config.json").is_file():
        parser.error(f"RUN_DIRECTORY = {arguments.directory}: no run lies there")
    figures = asyncio.run(measure(arguments.directory.absolute(), arguments.visits))
    print(f"milliseconds, median and worst of {arguments.visits} visits; {command_line.machine()}")
    for page, row in figures.items():
        print(f"  {page:8}" + "".join(f"  {what} {row[what][0]:5.0f} {row[what][1]:5.0f}" for what in row))
    command_line.write(arguments.json, {"visits": arguments.visits, "milliseconds": figures})


async def measure(directory: Path, visits: int) -> dict[str, dict[str, tuple[float, float]]]:
    """Returns page → what → (median, worst) milliseconds."""
    token, port = secrets.token_urlsafe(32), free_port()
    environment = {
        "MYXO_RUN": directory.name,
        "MYXO_RUN_DIRECTORY": str(directory),
        "MYXO_CONSOLE": f"127.0.0.1:{port}",
        "MYXO_CONSOLE_TOKEN": token,
    }
    with tempfile.TemporaryDirectory() as room, ServiceProcess("console", Path(room) / "console.log", environment) as console:
        await until(lambda: _answers(f"http://127.0.0.1:{port}/api/overview", token), "an answer of the console")
        assert console.process.poll() is None, console.words()
        figures: dict[str, dict[str, tuple[float, float]]] = {}
        async with chromium() as browser:
            for page in PAGES:
                seen = [await _visit(browser, f"http://127.0.0.1:{port}/", token, page) for _ in range(visits)]
                figures[page] = {what: (statistics.median(one[what] for one in seen), max(one[what] for one in seen)) for what in seen[0]}
        return figures


async def _answers(url: str, token: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(url, headers={"Authorization": f"Bearer {token}"}) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def _visit(browser: Browser, url: str, token: str, page: str) -> dict[str, float]:
    size: Any = LAPTOP
    context = await browser.new_context(viewport=size)
    try:
        tab = await context.new_page()
        await context.request.get(f"{url}?token={token}")  # takes the cookie
        await tab.goto(f"{url}#/{page}", wait_until="commit")
        await tab.locator("main .page").filter(has_text=FILLED).wait_for()
        data = await tab.evaluate("performance.now()")
        return {"paint": await tab.evaluate(PAINT), "data": data}
    finally:
        await context.close()


if __name__ == "__main__":
    main()
