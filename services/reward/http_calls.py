"""Posts JSON to a server, again after a pause where that fails: what the remote reward and the judge have in common.

The server is trusted as little as an environment is (`shared.environment.http_environment`): no redirect, no proxy, a bounded answer.
"""

import asyncio
import json
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
from yarl import URL

from shared.environment.environment_url import blocked
from shared.environment.http_environment import BlockedAddress, open_session, read_body
from shared.environment.protocol import MAX_ANSWER, EnvironmentFailed, words
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.runtime.safe_files import parse_json

LONGEST_PAUSE = 30.0
"""The most seconds between two tries; the first pause is one second, and each is twice the one before."""


class HttpCalls:
    """Calls to one URL.

    Args:
        label: the server's name in errors. url: may have a user, a password and a query. connections: at once, others wait.
        timeout_s: for each try. tries: how often a call is made at most. again: whether an HTTP status is worth another try.
    """

    def __init__(
        self,
        label: str,
        url: str,
        connections: int,
        timeout_s: float,
        tries: int,
        headers: Mapping[str, str] | None = None,
        again: Callable[[int], bool] = lambda status: True,
    ) -> None:
        self.label, self._url, self._timeout, self._tries, self._again = label, URL(url), timeout_s, tries, again
        self._headers = {"Accept": "application/json", "Content-Type": "application/json", "User-Agent": "myxo", **(headers or {})}
        self._connections = connections
        self._session: aiohttp.ClientSession | None = None

    async def post(self, body: object) -> Any:
        """Returns the decoded answer. Raises EnvironmentFailed or DeadlineExceeded, as the last try ended."""
        try:
            data = json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvironmentFailed(self.label, f"the request does not go into JSON: {error}") from error
        for number in range(self._tries - 1):
            try:
                return await self._try(data)
            except _Hopeless as error:
                raise EnvironmentFailed(self.label, error.reason) from error
            except (EnvironmentFailed, DeadlineExceeded):
                await asyncio.sleep(min(2.0**number, LONGEST_PAUSE) + random.random())
        return await self._try(data)

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()

    async def _try(self, data: bytes) -> Any:
        if why := blocked(self._url.host or ""):
            raise _Hopeless(self.label, f"{self._url.host} is {why}, which is never connected to")
        try:
            async with asyncio.timeout(self._timeout):
                status, answer = await self._exchange(data)
        except TimeoutError:
            raise DeadlineExceeded("the answer", self.label, self._timeout, "given up") from None
        except BlockedAddress as error:
            raise _Hopeless(self.label, str(error)) from None
        except (aiohttp.ClientError, ValueError) as error:
            raise EnvironmentFailed(self.label, words(str(error) or type(error).__name__)) from error
        if not 200 <= status < 300:
            kind = EnvironmentFailed if self._again(status) else _Hopeless
            raise kind(self.label, f"answered with HTTP {status}", words(answer[:200].decode(errors="replace")))
        if len(answer) > MAX_ANSWER:
            raise EnvironmentFailed(self.label, f"answered with more than {MAX_ANSWER} bytes")
        try:
            return parse_json(answer)
        except ValueError as error:
            raise EnvironmentFailed(self.label, f"answered {words(repr(answer[:60]))}; expected JSON ({words(error)})") from None

    async def _exchange(self, data: bytes) -> tuple[int, bytes]:
        if self._session is None:
            self._session = open_session(self._connections)
        async with self._session.post(self._url, data=data, headers=self._headers, allow_redirects=False) as response:
            return response.status, await read_body(response)


class _Hopeless(EnvironmentFailed):
    """What another try would not change."""


def from_environment(field: str, variable: str) -> str:
    """Returns the value of an environment variable. Raises ConfigError for ``field`` where it is not set."""
    if not (value := os.environ.get(variable)):
        raise ConfigError(field, variable, "a variable that is set where the reward service starts")
    return value
