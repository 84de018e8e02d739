"""The console in a real browser, beside a run on this machine's CPU: what its rewards and prompts say is as foreign as it can be."""

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.e2e.conftest import write_small_run
from tests.e2e.launched import LaunchedRun, gauge
from tests.e2e.live_console import SECONDS, SHOWN_MS, LiveConsole, console_of
from tests.support.browser import LAPTOP, PHONE, chromium
from tests.support.foreign_reward import LONG, SCRIPT, TURNED
from tests.support.waiting import until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(1200), pytest.mark.asyncio(loop_scope="module")]

RUN = "looked-at"
PAGES = {"run": "Run", "flow": "Flow", "weights": "Weights", "samples": "Samples", "health": "Health"}
STEPS = 100_000
"""More than are trained while the tests look: the run is ended by them."""

FLAGS = (
    "--console", "--custom-rm-path", "tests.support.foreign_reward:foreign",
    "--eval-interval", "4", "--save-interval", "4", "--keep-rollouts-tokens",
)  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, forked_engines: None) -> AsyncIterator[LiveConsole]:
    """A run that has trained some steps and evaluated, and the console that `myxo up` started beside it."""
    async with chromium() as browser:
        directory = tmp_path_factory.mktemp("console")
        config = write_small_run(directory, tiny_model, RUN, steps=STEPS, staleness=2, endings=("", SCRIPT, TURNED, LONG))
        with LaunchedRun(config, directory / "runs" / RUN, RUN, (*FLAGS, "--dump-details", str(directory / "dumps"))) as run:
            await asyncio.to_thread(run.until, "five steps", lambda cards: gauge(cards, "buffer", "trained_steps") >= 5, 420)
            yield console_of(run, browser)


@pytest.mark.parametrize(
    ("page", "scheme"),
    [
        ("run", "light"),
        *(pytest.param(page, "light", marks=pytest.mark.extra) for page in PAGES if page != "run"),
        *(pytest.param(page, "dark", marks=pytest.mark.extra) for page in PAGES),
    ],
)
async def test_a_page_is_whole_for_everybody(live: LiveConsole, page: str, scheme: str) -> None:
    """One heading, landmarks, no fault that axe calls serious, on a laptop and on a phone, in light and dark; no error, nothing foreign."""
    async with live.page(page, scheme=scheme) as visit:
        await visit.filled(SHOWN_MS)
        await expect(visit.page).to_have_title(re.compile(rf"{PAGES[page]} .* {RUN}"))
        assert await visit.page.locator("h1").count() == 1
        await expect(visit.page.get_by_role("navigation").get_by_role("link", name=PAGES[page])).to_have_attribute("aria-current", "page")
        await expect(visit.page.locator("#banner")).to_be_hidden(timeout=SHOWN_MS)
        for size in (LAPTOP, PHONE):
            await visit.page.set_viewport_size(size)  # type: ignore[arg-type]
            await visit.settled()
            assert not await visit.overflows(), size
            assert not await visit.grave_faults(), size


@pytest.mark.parametrize("page", ["run", *(pytest.param(page, marks=pytest.mark.extra) for page in PAGES if page != "run")])
async def test_a_page_follows_the_run_without_a_reload(live: LiveConsole, page: str) -> None:
    async with live.page(page) as visit:
        await visit.settled()
        await visit.page.evaluate("window.kept = true")
        before = await visit.page.locator("main").inner_text(), await visit.page.locator("#progress").inner_text()

        async def changed() -> bool:
            return (await visit.page.locator("main").inner_text()) != before[0] and (
                await visit.page.locator("#progress").inner_text()
            ) != before[1]

        await until(changed, f"news on {page}", SECONDS, pause=0.5)
        assert await visit.page.evaluate("window.kept") is True, "the page was loaded again"


async def test_every_service_has_its_timeline(live: LiveConsole) -> None:
    async with live.page("flow") as visit:
        for service in ("buffer-0", "rollout-0", "reward-0", "trainer-0"):
            row = visit.page.get_by_role("row").filter(has=visit.page.get_by_role("rowheader", name=service))
            await expect(row.locator("svg rect").first).to_be_attached(timeout=SHOWN_MS)
        await expect(visit.page.locator(".verdict")).to_contain_text("wait", timeout=SHOWN_MS)
        parts = visit.page.get_by_role("img", name=re.compile("^A step's parts: .*gradient .*optimizer step .* %"))
        await expect(parts).to_be_attached(timeout=SHOWN_MS)


@pytest.mark.parametrize("page", ["run", pytest.param("weights", marks=pytest.mark.extra)])
async def test_every_chart_has_a_curve(live: LiveConsole, page: str) -> None:
    async with live.page(page) as visit:
        await visit.page.locator("figure.chart").first.wait_for(timeout=SHOWN_MS)

        async def bare() -> list[str]:
            found: list[str] = await visit.page.evaluate(BARE_CHARTS)
            return found

        async def drawn() -> bool:
            return not await bare()

        try:
            await until(drawn, "curves", SECONDS, pause=0.5)
        except AssertionError:
            raise AssertionError(f"without a curve: {await bare()}") from None


BARE_CHARTS = """() => {
  const rgb = (colour) => {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = colour;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const style = getComputedStyle(document.documentElement);
  const colours = [1, 2, 3, 4, 5, 6].map((index) => rgb(style.getPropertyValue(`--series-${index}`).trim()));
  const near = (data, at, colour) => colour.every((part, index) => Math.abs(part - data[at + index]) < 24) && data[at + 3] > 150;
  return [...document.querySelectorAll("figure.chart")].filter((figure) => figure.checkVisibility()).filter((figure) => {
    const canvas = figure.querySelector("canvas");
    if (!canvas || !canvas.width) return true;
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    let inked = 0;
    for (let at = 0; at < data.length; at += 4) if (colours.some((colour) => near(data, at, colour))) inked += 1;
    return inked < 8;
  }).map((figure) => figure.querySelector("figcaption").textContent);
}"""
"""The titles of the charts without a pixel in the colour of a curve."""


async def test_from_a_point_of_a_curve_to_the_tokens_behind_it(live: LiveConsole) -> None:
    async with live.page("run") as visit:
        page = visit.page
        stage = page.locator("figure.chart .u-over").first
        await stage.wait_for(timeout=SHOWN_MS)
        await stage.scroll_into_view_if_needed()
        box = await stage.bounding_box()
        assert box is not None
        await stage.hover(position={"x": box["width"] / 2, "y": box["height"] / 2})
        await stage.click(position={"x": box["width"] / 2, "y": box["height"] / 2})
        await page.wait_for_url(re.compile(r"#/samples\?.*step=\d+"), timeout=SHOWN_MS)
        await page.locator("main tbody a[href*='#/samples/']").first.click(timeout=SHOWN_MS)
        await page.wait_for_url(re.compile(r"#/samples/g\d+$"), timeout=SHOWN_MS)
        await expect(page.get_by_role("main")).to_contain_text("myxo replay", timeout=SHOWN_MS)
        await page.locator("main tbody a[href*='#/samples/']").first.click(timeout=SHOWN_MS)
        await page.wait_for_url(re.compile(r"#/samples/g\d+/0$"), timeout=SHOWN_MS)
        tokens = page.locator("main .tokens .token")
        await expect(tokens.first).to_be_visible(timeout=SHOWN_MS)
        for colouring in await page.get_by_label("Colour by").locator("option").all():
            if await colouring.is_enabled():
                await page.get_by_label("Colour by").select_option(await colouring.get_attribute("value"))
                await expect(tokens.first).to_be_visible()


async def test_foreign_text_is_shown_and_never_run(live: LiveConsole) -> None:
    """Prompts, names of rewards and errors hold markup, turned writing and control characters."""
    for where in ("health", "samples?status=dead", "samples", "run", "flow"):
        async with live.page(where) as visit:
            await visit.settled()
            assert await visit.page.evaluate("window.stolen") is None
            assert await visit.page.locator("main img").count() == 0
    async with live.page("health") as visit:
        await expect(visit.page.get_by_role("main")).to_contain_text(SCRIPT, timeout=SHOWN_MS)


async def test_a_keyboard_is_enough(live: LiveConsole) -> None:
    async with live.page("run") as visit:
        page = visit.page
        await page.locator("figure.chart .u-over").first.wait_for(timeout=SHOWN_MS)
        await page.keyboard.press("Tab")
        await expect(page.locator(".skip")).to_be_focused()
        for name in PAGES.values():
            await page.keyboard.press("Tab")
            await expect(page.get_by_role("navigation").get_by_role("link", name=name)).to_be_focused()
            assert await page.evaluate(FOCUS_IS_SEEN), name
        await page.keyboard.press("Enter")
        await expect(page).to_have_url(re.compile("#/health"))


FOCUS_IS_SEEN = """() => {
  const style = getComputedStyle(document.activeElement);
  return (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1) || style.boxShadow !== "none";
}"""


async def test_a_strangers_token_opens_nothing(live: LiveConsole) -> None:
    """Every path that OpenAPI names, every file, in any method, with no token, a wrong one, or a part of the right one."""
    strangers = [{}, {"Authorization": "Bearer " + "x" * len(live.token)}, {"Authorization": f"Bearer {live.token[:-1]}"}]
    strangers += [{"Cookie": "myxo-console=x; token=x"}, {"Authorization": f"Basic {live.token}"}]
    url = f"http://{live.host}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/api/openapi.json", headers={"Authorization": f"Bearer {live.token}"}) as answer:
            assert answer.status == 200
            described = list((await answer.json())["paths"])
        files = [f"/{path.relative_to(WEB)}" for path in WEB.rglob("*") if path.is_file()]
        assert len(described) >= len(PAGES) and len(files) > len(PAGES)
        paths = ["/", "/?token=x", "/docs", "/api/openapi.json", "/nowhere", "/api/nowhere", *files]
        paths += [re.sub(r"{.*?}", "0", path) for path in described]
        for path in paths:
            for headers in strangers:
                for method in ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"):
                    async with session.request(method, url + path, headers=headers, allow_redirects=False) as answer:
                        assert answer.status == 401, (method, path, headers)
        async with session.get(f"{url}/", headers={"Authorization": f"Bearer {live.token}", "Host": "attacker.example"}) as answer:
            assert answer.status == 421


WEB = Path(__file__).parents[2] / "services" / "console" / "web"


@pytest.mark.parametrize(
    ("program", "named"),
    [
        pytest.param("services.trainer", "trainer", marks=pytest.mark.extra),
        pytest.param("nats-server", "NATS", marks=pytest.mark.extra),
        pytest.param("services.buffer", "buffer", marks=pytest.mark.extra),
        pytest.param("valkey-server", "Redis", marks=pytest.mark.extra),
    ],
)
async def test_what_is_killed_is_named_and_comes_back(live: LiveConsole, program: str, named: str) -> None:
    """The launcher is held still meanwhile, so that what was killed stays away until the page has said so."""
    async with live.page("flow") as visit:
        page = visit.page
        await visit.settled()
        banner = page.locator("#banner")
        await expect(banner).to_be_hidden(timeout=SHOWN_MS)
        victim = live.run.child(program)
        live.run.process.send_signal(signal.SIGSTOP)
        try:
            live.run.kill(victim)
            await expect(banner).to_contain_text(named, timeout=SHOWN_MS)
            for other in PAGES:
                await visit.go(other)
                await visit.filled(SHOWN_MS)
                await expect(banner).to_contain_text(named, timeout=SHOWN_MS)
        finally:
            live.run.process.send_signal(signal.SIGCONT)
        await expect(banner).to_be_hidden(timeout=3 * SHOWN_MS)
        before = await page.locator("#progress").inner_text()
        await expect(page.locator("#progress")).not_to_have_text(before, timeout=3 * SHOWN_MS)
        visit.refused.clear()  # answers of 503 name what is away
        visit.errors[:] = [error for error in visit.errors if "503" not in error]
