"""Lets in only requests with the console's token: an ASGI layer around the whole app.

``GET /?token=…`` sets a cookie and redirects to ``/``, so that the token leaves the address line; programs send ``Authorization: Bearer``.
The ``Host`` header has to name this machine: a page of a foreign site whose name was bound to 127.0.0.1 (DNS rebinding) is refused.
"""

import hashlib
import hmac
import re
from collections.abc import Collection, Iterable
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LEAST_TOKEN = 16  # Characters of the shortest token that is taken
OWN_NAMES = ("127.0.0.1", "localhost", "::1")  # The names of this machine for itself

# A Host header: a name or an address, and a port (RFC 9110, section 7.2)
HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[(?P<v6>[0-9a-f:.]+)\])(:[0-9]{1,5})?", re.IGNORECASE)

READING = ("GET", "HEAD")

_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_STRANGER = "401: this console shows a run to whoever has its token. Open the address that `myxo up` or `myxo console` has printed.\n"


class AccessToken:
    """The layer. ``names``: of the hosts by which the console may be asked, besides `OWN_NAMES`; ``token``: what opens it."""

    def __init__(self, app: ASGIApp, token: str, names: Iterable[str] = ()) -> None:
        self._app, self._token = app, token
        self._names = frozenset(name.lower() for name in (*OWN_NAMES, *names))
        # browsers send a cookie to every port of a host: consoles side by side need names of their own
        self._cookie = f"myxo-console-{hashlib.sha256(token.encode()).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = self._refusal(scope) or self._entrance(scope)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(_HEADERS)
                if scope["path"].startswith("/api/") or answer is not None:
                    headers["Cache-Control"] = "no-store"
                else:
                    headers["Cache-Control"] = "no-cache"  # asked for again each time, and answered with 304
            await send(message)

        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """Returns what a request is refused with; None where it may pass."""
        headers = Headers(scope=scope)
        if not _names_one(headers.getlist("host"), self._names):
            known = ", ".join(sorted(self._names))
            text = f"421: the console is not asked by this name; it answers to {known}, and to those of console.console_hosts\n"
            return PlainTextResponse(text, 421)
        if not self._opens(headers, _query_token(scope)):
            return PlainTextResponse(_STRANGER, 401, {"WWW-Authenticate": "Bearer"})
        if scope["method"] not in READING:
            return PlainTextResponse("405: the console only reads\n", 405, {"Allow": ", ".join(READING)})
        return None

    def _opens(self, headers: Headers, query: str) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        bearer = given.strip() if scheme.lower() == "bearer" else ""
        return any([self._is_token(text) for text in (query, bearer, _cookie(headers, self._cookie))])

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="surrogateescape"), self._token.encode())

    def _entrance(self, scope: Scope) -> Response | None:
        """Returns the redirection of a request that has brought the token in its address; None for any other."""
        if scope["path"] != "/" or not _query_token(scope):
            return None
        answer = RedirectResponse("/", 303)
        answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", secure=scope["scheme"] == "https")
        return answer


def _query_token(scope: Scope) -> str:
    """Returns the token in the address; only the first page has one."""
    if scope["path"] != "/":
        return ""
    return parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value


def _names_one(given: list[str], names: Collection[str]) -> bool:
    """Returns whether the one Host header names one of the hosts, at whatever port: containers publish another than they listen at."""
    found = HOST.fullmatch(given[0]) if len(given) == 1 else None
    return found is not None and (found["v6"] or found["name"]).lower() in names
