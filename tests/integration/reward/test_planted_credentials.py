"""Credentials in a config's URLs, in the environment and in a server's answers: none comes out of a reward service again."""

import asyncio

import pytest

from shared.process.embedded_servers import free_port
from tests.integration.reward.test_named_rewards import NewBench
from tests.support.http_server import http_server


@pytest.mark.parametrize("away", [True, False])
async def test_a_reward_service_logs_and_tells_no_credential(bench: NewBench, monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-hush-of-the-judge-key")
    monkeypatch.setenv("HF_TOKEN", "hf_hushhushhushhushhush")
    async with http_server(lambda asked, number: "no reward at all") as server:
        base = f"127.0.0.1:{free_port()}" if away else server.url.removeprefix("http://")
        reward = {
            "rm_type": "remote_rm",
            "rm_url": f"http://me:hush@{base}/rm?token=hush2&level=3",
            "rm_tries": 1,
            "rm_timeout": 5,
            "judge_url": f"http://judge:hush3@{base}/v1",
            "judge_model": "m",
            "judge_tries": 1,
            "judge_timeout": 5,
            "judge_key_variable": "JUDGE_KEY",
            "environments": {"grader": f"http://me:hush4@{base}/env"},
            "worker_environment": ["HF_TOKEN"],
        }
        desk = await bench(reward=reward)
        process = await desk.launch()
        for number, environment in enumerate((None, "judge")):
            await desk.generated(f"g{number}", "abc", environment=environment)
            said = await desk.failure(f"g{number}")
            assert "hush" not in said, said
        heard = b""
        for stream in (desk.names.events_stream, desk.names.scored_stream, f"KV_{desk.names.services_bucket}"):
            info = await desk.bus.js.stream_info(stream)
            for sequence in range(info.state.first_seq, info.state.last_seq + 1):
                try:
                    heard += (await desk.bus.js.get_msg(stream, sequence)).data or b""
                except Exception:
                    continue  # one that was replaced or taken
        assert b"reward-1" in heard and b"hush" not in heard
        await asyncio.to_thread(process.stop)
        assert "hush" not in process.words(), process.words()
