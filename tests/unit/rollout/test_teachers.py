"""Teachers of on-policy distillation: what their servers are asked."""

import asyncio
from typing import Any

import pytest

from services.rollout.teachers import Teachers
from shared.config.algorithm import AlgorithmSection
from tests.support.http_server import http_server
from tests.support.train_samples import train_sample


async def test_teachers_are_asked_at_the_rollouts_temperature() -> None:
    def generate(asked: dict[str, Any], _: int) -> dict[str, Any]:
        return {"meta_info": {"input_token_logprobs": [[-0.5, token, None] for token in asked["input_ids"]]}}

    async with http_server(generate) as server:
        section = AlgorithmSection(use_opd=True, opd_type="sglang", opd_teachers={"a": f"{server.url}/generate"})
        for temperature in (0.7, 1.0):
            teachers = Teachers(section, temperature)
            [taught] = await teachers.taught([train_sample([1, 2], [3, 4])])
            await teachers.close()
            assert taught.attributes["teacher_log_probs"].tolist() == [-0.5, -0.5]
    assert [request["sampling_params"]["temperature"] for request in server.asked] == [0.7, 1.0]


async def test_a_sample_that_waits_for_a_place_has_all_of_its_time_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a slow teacher loses what it was never asked for, however many it has answered."""
    begun, seen, timeout = list[float | None](), list[int](), asyncio.timeout

    def generate(asked: dict[str, Any], _: int) -> dict[str, Any]:
        seen.append(begun.count(123.0))
        return {"meta_info": {"input_token_logprobs": [[-0.5, token, None] for token in asked["input_ids"]]}}

    async with http_server(generate) as server:
        teacher = {"opd_teachers": {"a": f"{server.url}/generate"}, "opd_teacher_timeout": 123.0, "opd_teacher_concurrency": 1}
        teachers = Teachers(AlgorithmSection(use_opd=True, opd_type="sglang", **teacher))
        monkeypatch.setattr(asyncio, "timeout", lambda seconds: begun.append(seconds) or timeout(seconds))
        assert len(await teachers.taught([train_sample([1, 2], [3, 4])] * 3)) == 3
        await teachers.close()
    assert seen == [1, 2, 3]
