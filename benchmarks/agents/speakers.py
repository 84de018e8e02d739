"""How clients of each format speak: the body of a conversation's next request, and what an answer adds to the conversation.

They send JSON over connections that stay open and nothing else, so that what is measured is the gateway and not a client library.
"""

from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from shared.runtime.errors import MyxoError


class Speaker:
    """One conversation in one format. ``path``: of its endpoint. ``most``: tokens of an answer, ``fixed``: and as few."""

    path: str

    def __init__(self, most: int, fixed: bool) -> None:
        self.most, self.fixed = most, fixed

    def say(self, text: str) -> None:
        """Adds what the user says."""
        raise NotImplementedError

    def body(self) -> dict[str, Any]:
        """Returns the next request's body."""
        raise NotImplementedError

    def hear(self, answer: dict[str, Any]) -> None:
        """Adds an answer."""
        raise NotImplementedError

    @property
    def _least(self) -> dict[str, int]:
        return {"min_tokens": self.most} if self.fixed else {}


class ChatSpeaker(Speaker):
    """OpenAI's chat completions."""

    path = "/v1/chat/completions"

    def __init__(self, most: int, fixed: bool) -> None:
        super().__init__(most, fixed)
        self.messages: list[Any] = []

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def body(self) -> dict[str, Any]:
        return {"model": "any", "messages": self.messages, "max_tokens": self.most, **self._least}

    def hear(self, answer: dict[str, Any]) -> None:
        message = answer["choices"][0]["message"]
        self.messages.append({key: value for key, value in message.items() if value is not None})


class MessagesSpeaker(ChatSpeaker):
    """Anthropic's messages."""

    path = "/v1/messages"

    def hear(self, answer: dict[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": answer["content"]})


class ResponsesSpeaker(ChatSpeaker):
    """OpenAI's responses, the whole conversation in each request."""

    path = "/v1/responses"

    def body(self) -> dict[str, Any]:
        return {"model": "any", "input": self.messages, "max_output_tokens": self.most, **self._least}

    def hear(self, answer: dict[str, Any]) -> None:
        self.messages += answer["output"]


class TokenSpeaker(Speaker):
    """Token ids in and out. A user's character is the token of its number."""

    path = "/inference/v1/generate"

    def __init__(self, most: int, fixed: bool) -> None:
        super().__init__(most, fixed)
        self.tokens: list[int] = []

    def say(self, text: str) -> None:
        self.tokens += [1 + ord(letter) - 32 for letter in text]

    def body(self) -> dict[str, Any]:
        return {"token_ids": self.tokens, "sampling_params": {"max_tokens": self.most, **self._least}}

    def hear(self, answer: dict[str, Any]) -> None:
        self.tokens += answer["choices"][0]["token_ids"]


FORMATS: dict[str, type[Speaker]] = {
    "chat": ChatSpeaker,
    "messages": MessagesSpeaker,
    "responses": ResponsesSpeaker,
    "generate": TokenSpeaker,
}


@dataclass(frozen=True)
class Said:
    """An answer. ``prompt``, ``cached``, ``drawn``: tokens by its usage. ``seconds``: until it was there."""

    request: str
    prompt: int
    cached: int
    drawn: int
    seconds: float = field(default=0.0)


async def asked(http: aiohttp.ClientSession, url: str, key: str, speaker: Speaker) -> Said:
    """Sends a conversation's next request, and has it hear the answer. Raises MyxoError where it is refused."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    async with http.post(url + speaker.path, data=orjson.dumps(speaker.body()), headers=headers) as response:
        content = await response.read()
    if response.status != 200:
        raise MyxoError(f"{speaker.path} answered {response.status}: {content[:300].decode(errors='replace')}")
    answer = orjson.loads(content)
    speaker.hear(answer)
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached = details.get("cached_tokens", usage.get("cache_read_input_tokens", 0)) or 0
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    drawn = usage.get("completion_tokens", usage.get("output_tokens", 0))
    return Said(answer.get("id") or answer["request_id"], prompt, cached, drawn)
