"""An agent behind a URL, in any language and with packages of its own: it is sent rollouts, plays them over the gateway, answers rewards.

``POST`` of ``{"data": …, "base_url": …, "api_key": …}`` in JSON, what an agent that is a function takes; the answer is ``{"reward": …}``
with what such a function returns, or ``{"error": text}`` with another status than 200. It comes when the rollout has ended; a connection
that is closed before says that it is not waited for any more.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
from pydantic import BaseModel, Field

from shared.agents.agent_options import options_of
from shared.agents.agent_proxy import NOT_SENT
from shared.environment.environment_url import without_credentials
from shared.environment.http_environment import BlockedAddress, open_session, read_body
from shared.environment.protocol import MAX_ANSWER, words
from shared.runtime.errors import MyxoError
from shared.runtime.safe_files import parse_json
from shared.runtime.tasks import doubling

# A service that cannot be connected to, by itself or by its proxy, is tried again, with pauses that grow up to this one: it may be
# starting.
CONNECT_SECONDS, LONGEST_PAUSE_S = 5.0, 2.0


class HttpOptions(BaseModel):
    """``agent_options``. url: where rollouts are posted. start_seconds: how long a service that cannot be connected to is waited for.
    The service is sent further options as they are."""

    url: str = Field(pattern=r"^https?://[^/]+")
    start_seconds: float = Field(default=120.0, ge=0)


class AgentServiceFailed(MyxoError):
    """The service has no reward for a rollout. ``url``: its address, without credentials. ``reason``: why."""

    def __init__(self, url: str, reason: str) -> None:
        self.url, self.reason = without_credentials(url), reason
        super().__init__(f"the agent at {self.url}: {reason}")


async def play(data: Mapping[str, Any], base_url: str, api_key: str) -> object:
    """Has a service play one rollout, and returns the reward that it gives. Raises ConfigError for wrong options, AgentServiceFailed."""
    options = options_of(data, HttpOptions)
    url = options.url
    asked = {"data": dict(data), "base_url": base_url, "api_key": api_key}
    async with open_session(1, CONNECT_SECONDS) as session:
        status, body = await _answer(session, url, json.dumps(asked, ensure_ascii=False).encode(), options.start_seconds)
    if len(body) > MAX_ANSWER:
        raise AgentServiceFailed(url, f"answered with more than {MAX_ANSWER} bytes")
    try:
        answer = parse_json(body)
    except ValueError:
        answer = None
    if status != 200:
        said = words(answer["error"]) if isinstance(answer, dict) and answer.get("error") else ""
        raise AgentServiceFailed(url, f"HTTP {status}" + (f": {said}" if said else ""))
    if not isinstance(answer, dict) or "reward" not in answer:
        raise AgentServiceFailed(
            url, f'answered {words(body[:80].decode(errors="replace"))}; expected {{"reward": a number, numbers by name, or null}}'
        )
    return answer["reward"]


async def _answer(session: aiohttp.ClientSession, url: str, body: bytes, start_seconds: float) -> tuple[int, bytes]:
    """Returns status and body of the answer, of which one byte over the limit is read at most."""
    pauses, end = doubling(0.25, LONGEST_PAUSE_S), time.monotonic() + start_seconds
    while True:
        try:
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}, allow_redirects=False) as response:
                answer = await read_body(response)
                if NOT_SENT not in response.headers:
                    return response.status, answer
                reason = words(answer.decode(errors="replace"))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            reason = words(error)
        except (BlockedAddress, aiohttp.ClientError, ValueError) as error:
            raise AgentServiceFailed(url, words(error) or type(error).__name__) from None
        # it has not been sent
        if time.monotonic() + (pause := next(pauses)) > end:
            raise AgentServiceFailed(url, f"cannot be reached within {start_seconds:g} s: {reason}")
        await asyncio.sleep(pause)
