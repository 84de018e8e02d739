"""What the NATS server refuses, as a connection hears of it: beside the request that was refused, or instead of being let in."""

from __future__ import annotations

import re
import ssl
import time
from collections import deque

import nats.errors

from shared.runtime import server_urls

KEPT = 256
"""Violations remembered."""

_VIOLATION = re.compile(r'permissions violation for (?:publish|subscription) to "([^"]*)"')


class PermissionErrors:
    """What the server has refused a connection lately. It says so beside the request, which itself just stays without an answer."""

    def __init__(self, inbox: str) -> None:
        self._inbox = inbox.lower()  # the client library gives the server's words in lower case
        self._seen: deque[tuple[float, str, str]] = deque(maxlen=KEPT)

    def note(self, text: str) -> None:
        """Takes an error of the connection; only violations are kept."""
        if found := _VIOLATION.search(text.lower()):
            self._seen.append((time.monotonic(), found[1], text))

    def since(self, start: float, *subjects: str) -> str | None:
        """The server's words on a subject that begins like one of these, or on this client's replies, since ``start`` (monotonic)."""
        begins = (self._inbox, *(subject.lower() for subject in subjects))
        return next((text for at, subject, text in self._seen if at >= start and subject.startswith(begins)), None)


def hopeless_reason(error: Exception) -> str | None:
    """Why connecting again will not help; None where it may."""
    if isinstance(error, nats.errors.AuthorizationError) or "authorization violation" in str(error).lower():
        return "authorization violation: it does not take these credentials"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({error.verify_message}); name the authority's file in {server_urls.CA_VARIABLE}"
    return None
