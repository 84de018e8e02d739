"""The client of training environments, and the URL that agents are told."""

from typing import Any

import openai
import pytest
from renderers.base import ParsedResponse
from renderers.client import OverlongPromptError, generate

from services.gateway.gateway_service import gateway_url
from shared.formats.request import overlong_prompt
from shared.runtime.errors import ConfigError
from tests.support.wire_server import PLAIN, TOKENS, wire_server


class _Renderer:
    """As much of a renderer as its client asks where the prompt is made already."""

    def get_stop_token_ids(self) -> list[int]:
        return [2]

    def parse_response(self, ids: list[int], **_: Any) -> ParsedResponse:
        return ParsedResponse(content=str(ids))


async def test_the_client_of_training_environments_reads_its_tokens() -> None:
    """What verifiers and prime-rl send, a bridged turn's fields among it; the context length is read from the models."""
    async with wire_server() as server, openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        server.answers = [PLAIN]
        given = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 4, "seed": 3, "min_p": 0.0, "routed_experts_prompt_start": 2}
        ask: Any = {"client": client, "renderer": _Renderer(), "messages": [], "model": "tiny", "sampling_params": given, "cache_salt": "7"}
        drawn = await generate(prompt_ids=[4, 5], extra_headers={"X-Session-ID": "one"}, **ask)
        assert drawn["completion_ids"] == TOKENS.completion.tolist()
        assert drawn["completion_logprobs"] == TOKENS.logprobs.tolist()
        assert (drawn["request_id"], drawn["finish_reason"], drawn["usage"]["completion_tokens"]) == (PLAIN.request_id, "stop", 3)
        [turn] = server.turns
        assert (turn.prompt.tolist(), turn.sampling.stop_token_ids, turn.sampling.seed) == ([4, 5], (2,), 3)
        with pytest.raises(OverlongPromptError, match="513"):
            await generate(prompt_ids=[1] * 513, **ask)
        server.answers = [overlong_prompt(512, 400)]
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            await generate(prompt_ids=[1] * 512, **ask)


# --- the URL that agents are told: the gateway's address, or what the environment says of another network


def test_it_is_the_address_where_nobody_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MYXO_GATEWAY_URL", raising=False)
    assert gateway_url("10.0.0.3:8000") == "http://10.0.0.3:8000"
    for given, url in (("http://gateway:8000", "http://gateway:8000"), ("https://agents.example.org/", "https://agents.example.org")):
        monkeypatch.setenv("MYXO_GATEWAY_URL", given)
        assert gateway_url("10.0.0.3:8000") == url


@pytest.mark.parametrize("given", ["gateway:8000", "ftp://gateway", "http://", "http://gateway:8000/v1", "http://gateway?x", "http://a b"])
def test_what_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("MYXO_GATEWAY_URL", given)
    with pytest.raises(ConfigError, match="MYXO_GATEWAY_URL = "):
        gateway_url("10.0.0.3:8000")
