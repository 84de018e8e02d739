"""The website as `mkdocs build --strict` makes it: whole, structured as the pages on disk, and without anything from elsewhere."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[3]
FETCHING = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "link": "href"}
"""Tags whose attribute a browser fetches by itself."""

pytestmark = pytest.mark.extra  # CI builds the site each time


def built(site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("website") / "site"
    done = built(place)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return place


class Parsed(HTMLParser):
    """What a page has a browser fetch, where its links lead, and how many tags of each kind its article has."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in FETCHING and given.get("rel") not in ("canonical", "next", "prev"):
            self.fetched.append(given.get(FETCHING[tag]) or "")
        if tag == "a":
            self.links.append(given.get("href") or "")


def test_no_page_fetches_anything_from_elsewhere(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 60
    for page in pages:
        for url in Parsed(page.read_text()).fetched:
            assert not urlsplit(url).netloc, f"{page.relative_to(site)} fetches {url}"
            if url and page.name != "404.html" and not url.startswith("data:"):
                assert (page.parent / unquote(urlsplit(url).path)).exists(), f"{page.relative_to(site)} fetches {url}, which is not there"
    for style in site.rglob("*.css"):
        found = re.findall(r"(?:@import\s*|url\()[\"']?(?:https?:)?//[^\"')]+", style.read_text())
        assert not found, f"{style.relative_to(site)} fetches {found}"


def test_links_out_of_docs_lead_to_the_files(site: Path) -> None:
    """SECURITY.md names the tests that show its claims: on the site each is a page with the test's text."""
    security = site / "repository" / "SECURITY.html"
    tests = [link for link in Parsed(security.read_text()).links if re.match(r"tests/.*\.py\.html$", link)]
    assert len(tests) > 20
    for link in tests:
        assert "def test_" in re.sub("<[^>]*>", "", (security.parent / link).read_text()), link


def test_pages_have_the_same_structure_on_the_site_as_on_disk(site: Path) -> None:
    """Python-Markdown wants blank lines and four spaces where CommonMark does not: without them a list becomes a paragraph."""
    reader = MarkdownIt("commonmark").enable("table")
    for page in sorted((ROOT / "docs").glob("*.md")):
        html = (site / f"{page.stem}.html").read_text()
        article = html[html.index("<article") : html.index("</article")]
        expected = reader.render(page.read_text())
        for tag in ("li", "table", "tr", "td", "pre", "h1", "h2", "h3", "strong"):
            wanted, found = (len(re.findall(rf"<{tag}[\s>]", text)) for text in (expected, article))
            assert found == wanted, f"{page.name} has {wanted} <{tag}> where it lies, {found} on the site"


def test_formulas_are_shown_without_a_script(site: Path) -> None:
    pages = [(site / f"{name}.html").read_text() for name in ("staleness", "simulation", "algorithms")]
    assert all(page.count("<math") > 10 for page in pages)
    assert all("arithmatex" not in page and "\\frac" not in page for page in pages)


def test_broken_links_fail_the_build(tmp_path: Path) -> None:
    copy, links = tmp_path / "repository", ("not-there.md", "config.md#no-such-section", "../examples/not-there/README.md")
    copy.mkdir()
    for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        (copy / name).write_text(f"# {name}\n")
    (copy / "docs").mkdir()
    (copy / "docs" / "config.md").write_text("# Config\n")
    (copy / "docs" / "page.md").write_text("# Page\n\n" + " ".join(f"[gone]({link})" for link in links) + "\n")
    (copy / "docs" / "site.py").write_text((ROOT / "docs" / "site.py").read_text())
    settings = (ROOT / "mkdocs.yml").read_text()
    head, rest = settings.split("\nnav:\n")
    (copy / "mkdocs.yml").write_text(head + "\n" + rest[rest.index("\nhooks:") :].replace("omitted_files: warn", "omitted_files: ignore"))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1
    for told in links:
        assert re.search(rf"WARNING.*{told.partition('#')[2] or told}", done.stdout + done.stderr), done.stderr
