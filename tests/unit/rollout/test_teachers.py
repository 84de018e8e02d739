"""Teachers of on-policy distillation: what their servers are asked."""

from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from services.rollout.teachers import Teachers
from shared.config.algorithm import AlgorithmSection
from tests.support.train_samples import train_sample


async def test_teachers_are_asked_at_the_rollouts_temperature() -> None:
    asked: list[dict[str, Any]] = []

    async def generate(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"meta_info": {"input_token_logprobs": [[-0.5, token, None] for token in asked[-1]["input_ids"]]}})

    app = web.Application()
    app.router.add_post("/generate", generate)
    server = TestServer(app)
    await server.start_server()
    section = AlgorithmSection(use_opd=True, opd_type="sglang", opd_teachers={"a": str(server.make_url("/generate"))})
    sample = train_sample([1, 2], [3, 4])
    for temperature in (0.7, 1.0):
        teachers = Teachers(section, temperature)
        [taught] = await teachers.taught([sample])
        await teachers.close()
        assert taught.attributes["teacher_log_probs"].tolist() == [-0.5, -0.5]
    await server.close()
    assert [request["sampling_params"]["temperature"] for request in asked] == [0.7, 1.0]
