"""Who gets anything from a console: whoever has its token and asks by its name, and then to read alone."""

from pathlib import Path

import httpx
import pytest

from services.console.console_app import WEB
from tests.integration.console.conftest import TOKEN, ServedConsole

FILES = sorted(str(path.relative_to(WEB)) for path in WEB.rglob("*") if path.is_file())


def wrong_ways_in() -> dict[str, dict[str, str]]:
    """Headers of strangers."""
    return {
        "nothing": {},
        "another token": {"Authorization": f"Bearer {TOKEN[:-1]}x"},
        "a part of it": {"Authorization": f"Bearer {TOKEN[:-1]}"},
        "an empty one": {"Authorization": "Bearer"},
        "another scheme": {"Authorization": f"Basic {TOKEN}"},
        "no ASCII": {"Authorization": b"Bearer \xff\xfe\xf6".decode("latin-1")},
        "a cookie of another name": {"Cookie": f"token={TOKEN}"},
        "a wrong cookie": {"Cookie": "myxo-console-000000000000=x; =;;; myxo"},
    }


async def test_a_stranger_gets_401_on_every_path(served: ServedConsole) -> None:
    openapi = (await served.get("/api/openapi.json")).json()
    paths = ["/", "/api/openapi.json", "/docs", "/nothing", "/api/nothing", *openapi["paths"], *(f"/{name}" for name in FILES)]
    assert {"/api/overview", "/api/events"} < set(paths) and "/app.js" in paths
    for way, headers in wrong_ways_in().items():
        for path in paths if way in ("nothing", "another token") else paths[:6]:
            raw = {name: value.encode("latin-1") for name, value in headers.items()}
            answer = await served.client.get(served.url + path.replace("{", "").replace("}", ""), headers=raw)
            assert answer.status_code == 401, (way, path)
            assert TOKEN not in answer.text and "set-cookie" not in answer.headers
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
        assert (await served.client.request(method, f"{served.url}/api/overview")).status_code == 401
    for query in ("token=", "token=x", f"token={TOKEN}x", f"Token={TOKEN}"):
        assert (await served.client.get(f"{served.url}/?{query}")).status_code == 401
    assert (await served.client.get(f"{served.url}/api/overview?token={TOKEN}")).status_code == 401, "only the first page takes it"


@pytest.mark.extra
async def test_every_file_comes_with_the_token_and_is_not_asked_of_others(served: ServedConsole) -> None:
    for name in FILES:
        answer = await served.get(f"/{name}")
        assert answer.status_code == 200, name
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        if name.endswith(".js"):
            assert "javascript" in answer.headers["content-type"]
    for name in (path for path in FILES if "vendor" not in path and Path(path).suffix in (".js", ".css", ".html")):
        text = (WEB / name).read_text().replace("http://www.w3.org/2000/svg", "")  # a namespace, which nobody asks for
        assert "http://" not in text and "https://" not in text, name
    for path in ("/../console_app.py", "/%2e%2e/console_app.py", "/..%2fconsole_app.py"):
        assert (await served.get(path)).status_code == 404


async def test_the_printed_address_gives_a_cookie_and_leaves_the_address_line(served: ServedConsole) -> None:
    answer = await served.client.get(f"{served.url}/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
    async with httpx.AsyncClient(timeout=30) as browser:
        page = await browser.get(f"{served.url}/", headers={"Cookie": cookie.split(";")[0]})
        assert page.status_code == 200 and TOKEN not in page.text
        assert (await browser.get(f"{served.url}/api/overview", headers={"Cookie": cookie.split(";")[0]})).status_code == 200


async def test_whoever_has_the_token_may_only_read(served: ServedConsole) -> None:
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        answer = await served.client.request(method, f"{served.url}/api/overview", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 405, method


TRICKS = (
    "evil@127.0.0.1",
    "evil:x@localhost",
    "localhost/evil",
    "localhost#@evil",
    "localhost?evil",
    "localhost:80:80",
    "localhost:x",
    "::1",
)
"""Host headers that a reader of URLs takes for this machine's name, and that are no Host header."""


async def test_it_answers_to_its_own_names_alone(served: ServedConsole) -> None:
    for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "127.0.0.2", "[::", "a@b", *TRICKS):
        assert (await served.get("/", Host=host)).status_code == 421, host
        assert (await served.client.get(f"{served.url}/?token={TOKEN}", headers={"Host": host})).status_code == 421, host
    for host in ("localhost:1", "[::1]:8770", "127.0.0.1", "LOCALHOST", "console.example.org"):
        assert (await served.get("/", Host=host)).status_code == 200, host
