"""The console in a browser over directories alone: of a run in which everything is odd, and of one that has drawn nothing."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import expect

from services.console.console_app import console_app
from services.console.run_source import RunSource
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from shared.runtime.tasks import background
from tests.e2e.live_console import SHOWN_MS
from tests.support.browser import LAPTOP, PHONE, Visit, chromium
from tests.support.odd_run import SCRIPT, TEXTS, write_empty_run, write_odd_run
from tests.support.run_config import run_config

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

TOKEN = "t" * 32


@asynccontextmanager
async def visited(root: Path) -> AsyncIterator[Visit]:
    source = RunSource(root.name, None, None, root)
    app = console_app(source, TOKEN)
    async with background(source.keep()), http_endpoints.serving(app, HttpAddress("127.0.0.1", 0)) as at, chromium() as browser:
        context = await browser.new_context(viewport=LAPTOP, reduced_motion="reduce", timezone_id="Europe/Berlin")  # type: ignore[arg-type]
        visit = Visit(await context.new_page(), str(at))
        await visit.page.goto(f"http://{at}/?token={TOKEN}")
        yield visit
        visit.assert_clean()
        assert await visit.page.evaluate("window.stolen") is None
        assert await visit.page.locator("main img, main script").count() == 0


async def assert_fits(visit: Visit) -> None:
    for size in (LAPTOP, PHONE):
        await visit.page.set_viewport_size(size)  # type: ignore[arg-type]
        await visit.settled()
        assert not await visit.overflows(), (visit.page.url, size)
    assert not await visit.grave_faults(), visit.page.url


async def test_whatever_a_run_holds_is_shown_as_text(tmp_path: Path) -> None:
    async with visited(write_odd_run(run_config(tmp_path, run={"name": "odd"}))) as visit:
        main = visit.page.get_by_role("main")
        await expect(main).to_contain_text("values are NaN or infinite", timeout=SHOWN_MS)
        await expect(main).to_contain_text("Rewards by part: 21 more than the chart draws", timeout=SHOWN_MS)
        await assert_fits(visit)
        for number, (name, text) in enumerate(TEXTS.items()):
            await visit.go(f"samples/g{number:08d}/0")
            await expect(main).to_contain_text(f"Sample 0 of g{number:08d}", timeout=SHOWN_MS)
            if text:
                await expect(main).to_contain_text("monitoring.keep_rollouts_tokens = true", timeout=SHOWN_MS)
            shown = visit.page.locator("h2", has_text="Response").locator("+ pre")
            if text.isprintable() and text:
                assert await shown.inner_text() == text, name
            if name in ("one long word", "right to left"):
                await assert_fits(visit)
        await visit.go("samples/g00000090")
        await expect(main).to_contain_text(SCRIPT, timeout=SHOWN_MS)
        assert len(await visit.page.locator("h2").first.inner_text()) < 40, "the reason of its death is no heading"
        await assert_fits(visit)


@pytest.mark.extra
async def test_a_run_that_has_drawn_nothing_says_so_on_each_page(tmp_path: Path) -> None:
    words = {
        "run": "Curves appear here",
        "flow": "told by the run's ledger",
        "health": "told by the run's ledger",
        "weights": "No replica serves",
    }
    words |= {"samples": "has kept no responses", "samples/sessions": "without sessions"}
    async with visited(write_empty_run(run_config(tmp_path, run={"name": "empty"}))) as visit:
        for where, said in words.items():
            await visit.go(where)
            await expect(visit.page.get_by_role("main")).to_contain_text(said, timeout=SHOWN_MS)
            await expect(visit.page.locator("#banner")).to_be_hidden(timeout=SHOWN_MS)
            await assert_fits(visit)


async def test_rows_are_known_again_by_their_keys(tmp_path: Path) -> None:
    """What is opened, chosen or focused in a row stays with it where rows come, go and change places."""
    async with visited(write_empty_run(run_config(tmp_path, run={"name": "keys"}))) as visit:
        assert await visit.page.evaluate(KEYED) == {"words": "new a b2 d b", "same": True, "focused": "a", "open": True}


@pytest.mark.extra
async def test_a_tab_that_was_opened_in_the_background_shows_what_is_new_when_it_is_looked_at(tmp_path: Path) -> None:
    async with visited(write_empty_run(run_config(tmp_path, run={"name": "tab"}))) as visit:
        assert await visit.page.evaluate(IN_BACKGROUND) == [["run", "flow"], ["flow"]]


IN_BACKGROUND = """async () => {
  const { follow } = await import("/live.js");
  const real = window.EventSource;
  const listeners = {};
  window.EventSource = class { addEventListener(kind, heard) { listeners[kind] = heard; } close() {} };
  Object.defineProperty(document, "hidden", { value: true, configurable: true });
  const heard = [];
  const end = follow((pages) => heard.push(pages), () => {});
  Object.defineProperty(document, "hidden", { value: false, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
  for (const data of ['{"run": 1, "flow": 1}', '{"run": 1, "flow": 2}']) listeners.message({ data });
  end();
  window.EventSource = real;
  return heard;
}"""


@pytest.mark.extra
async def test_times_have_the_browsers_day_and_filters_that_follow_each_other_add_up(tmp_path: Path) -> None:
    async with visited(write_empty_run(run_config(tmp_path, run={"name": "list"}))) as visit:
        assert await visit.page.evaluate(MIDNIGHT) == "2026-03-02 00:30:00"
        await visit.go("samples")
        await visit.page.get_by_label("Reward from").wait_for(timeout=SHOWN_MS)
        await visit.page.evaluate(TWO_FILTERS)
        await expect(visit.page).to_have_url(re.compile("min_reward=0.5&status=dead|status=dead&min_reward=0.5"), timeout=SHOWN_MS)


MIDNIGHT = """async () => (await import("/dom.js")).clock(Date.UTC(2026, 2, 1, 23, 30) / 1000)"""

TWO_FILTERS = """() => {
  const labels = [...document.querySelectorAll("form label")];
  const control = (words) => labels.find((label) => label.textContent.startsWith(words)).querySelector("input, select");
  for (const [words, value, kind] of [["Reward from", "0.5", "input"], ["Status", "dead", "change"]]) {
    control(words).value = value;
    control(words).dispatchEvent(new Event(kind));
  }
}"""


KEYED = """async () => {
  const { el, renew } = await import("/dom.js");
  const row = (key, words) => el("details", { "data-key": key }, el("summary", {}, words ?? key));
  const list = el("div", {});
  document.body.append(list);
  renew(list, row("b"), row("gone"), row("a"), row("d"), el("p", {}, "b"));
  const [b, , a] = list.children;
  a.open = true;
  a.querySelector("summary").focus();
  renew(list, row("new"), row("a"), row("b", "b2"), row("d"), el("p", {}, "b"));
  const same = list.children[1] === a && list.children[2] === b;
  const focused = document.activeElement.textContent;
  const words = [...list.children].map((child) => child.textContent).join(" ");
  list.remove();
  return { words, same, focused, open: a.open };
}"""
