"""Whatever a model samples, a real gateway answers it in each format, and what is recorded is what was sampled."""

import json
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from shared.bus.registry import Registry
from shared.data.tokenizer import Tokenizer
from shared.schema.message import MAX_SAMPLES
from shared.schema.messages import Sampling
from shared.sessions.session import trajectories
from shared.sessions.session_store import SessionStore
from tests.integration.buffer.conftest import NewRun, new_run
from tests.support.gateways import Played, ready_gateway, started_gateway
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.scripted_replica import scripted_replica
from tests.support.service_process import ROOT

__all__ = ["new_run"]

CALLS = [
    '{"name": "add", "arguments": {"a": 1000000000000000000000000000000}}',
    '{"name": "add", "arguments": {"a": "\\ud83d"}}',
    '{"name": "add", "arguments": {"\\ude00": 1}}',
    '{"name": "\\ud83d", "arguments": {}}',
    '{"name": "add", "arguments": {"a": NaN}}',
]
"""What stands in calls; a half of a surrogate pair is spelled by JSON's escape."""

ADD = {"name": "add", "description": "Adds."}
FORMATS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function", "function": ADD}]},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", **ADD}]},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "tools": [{**ADD, "input_schema": {}}], "max_tokens": 500},
}


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    model = write_qwen3_tokenizer(tmp_path / "policy", template=None)
    shutil.copy(ROOT / "tests" / "support" / "qwen3_chat_template.jinja", model / "chat_template.jinja")
    return model


async def test_whatever_is_sampled_is_answered_and_recorded(new_run: NewRun, tiny_model: Path, tmp_path: Path) -> None:
    player = await new_run()
    registry, sessions = Registry(player.bus, player.config.run.name), SessionStore(player.store, player.config.run.name)
    called = [""]
    async with scripted_replica(registry, Tokenizer(tiny_model), lambda prompt: f"<tool_call>\n{called[0]}\n</tool_call>") as replica:
        with started_gateway(0, tmp_path, player.environment("gateway-0")) as process:
            url = await ready_gateway(registry, 0, process)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http:
                played = await Played.opened(sessions, sampling=Sampling(temperature=1.0, max_new_tokens=500), seed=7)
                headers = {"Authorization": f"Bearer {played.key}"}
                for called[0] in CALLS:
                    for path, body in FORMATS.items():
                        for stream in (False, True):
                            asked = {"model": "policy", "stream": stream, **body}
                            async with http.post(url + path, json=asked, headers=headers) as answer:
                                text = await answer.text()
                            assert answer.status == 200 and '"error": {' not in text and '"error":{' not in text, (called[0], path, text)
                            assert ("malformed_tool_calls" in text) == (called[0] != CALLS[0]), (called[0], path, text)
                several = {"model": "policy", "n": 3, **FORMATS["/v1/chat/completions"]}
                async with http.post(f"{url}/v1/chat/completions", json=several, headers=headers) as answer:
                    first = (await answer.json())["id"]
                async with http.post(f"{url}/v1/session/end", json={"reward": {"style": 1.0}}, headers=headers) as answer:
                    refused = await answer.json()
                assert (answer.status, refused["error"]["param"]) == (400, "reward"), "the reward that counts is missing"
    log = await played.log()
    assert len(log.turns) == len(CALLS) * len(FORMATS) * 2 + 3 and not log.pending and log.ended is None
    for name, turn in log.turns.items():
        request, given = replica.given[name]
        for recorded, sampled in ((turn.prompt, request.input_ids), (turn.completion, given.completion), (turn.log_probs, given.log_probs)):
            np.testing.assert_array_equal(recorded, sampled)
    assert sum(int(one.mask.sum()) for one in trajectories(log.turns.values())) == sum(len(turn.completion) for turn in log.turns.values())
    seeds = [replica.given[first + choice][0].seed for choice in ("", "n1", "n2")]
    before = (seeds[0] - 7) // MAX_SAMPLES  # requests for the same prompt, each of which has a seed of its own
    assert before and seeds == [7 + (before + number) * MAX_SAMPLES for number in range(3)], "none of another rollout of the group"
    assert json.loads(process.words().splitlines()[-1]) and "Traceback" not in process.words()
