"""Teachers of on-policy distillation: a real engine, asked by the rollout service for log-probs of what its own engine drew."""

import copy
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
import torch
from aiohttp import web

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.private_endpoints import SOCKET
from services.rollout.teachers import TeacherFailed, Teachers
from services.trainer.objective.advantage import distilled
from services.trainer.objective.distillation import IDS, DistillationLoss, top_k_fields, top_k_kl
from services.trainer.objective.loss import PolicyLoss
from services.trainer.packing import pack, places, spread
from shared.config.algorithm import AlgorithmSection
from shared.process.embedded_servers import free_port
from shared.runtime.errors import BadMessage, ConfigError, DeadlineExceeded
from shared.schema import sample as sample_codec
from shared.schema.messages import Failed
from shared.schema.sample import Sample
from tests.integration.engine.bench import PROMPT, NewBench
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.reference import log_probs
from tests.support.http_server import served
from tests.support.train_samples import train_sample

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-4
"""Nats that the engine's float32 and the reference's may differ by on a token."""

Spoil = Callable[[dict[str, Any]], dict[str, Any]]


@asynccontextmanager
async def opened(
    engine: EngineProcess, first: tuple[int, ...] = (), spoil: Spoil = lambda answer: answer, headers: list[str | None] | None = None
) -> AsyncIterator[str]:
    """The address on loopback of an engine, whose server listens on a socket of its own.

    Args:
        first: statuses of the first answers in place of the engine's; 0 breaks the connection off. spoil: changes what the engine answers.
        headers: gets the Authorization of each request.
    """
    left = list(first)

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if headers is not None:
            headers.append(request.headers.get("Authorization"))
        if left:
            if status := left.pop(0):
                return web.json_response({"error": {"message": "not now"}}, status=status)
            assert request.transport is not None
            request.transport.abort()
        async with inside.post("/generate", data=body, headers={"Content-Type": "application/json"}) as response:
            found = await response.json()
            return web.json_response(spoil(found) if response.ok else found, status=response.status)

    connector = aiohttp.UnixConnector(str(engine.receiver / SOCKET))
    async with aiohttp.ClientSession("http://engine", connector=connector) as inside, served(web.post("/generate", generate)) as url:
        yield url


def objective(urls: dict[str, str], **changes: Any) -> AlgorithmSection:
    return AlgorithmSection(use_opd=True, opd_type="sglang", opd_teachers=urls, **changes)


async def ask(config: AlgorithmSection, *samples: Sample) -> list[Sample]:
    teachers = Teachers(config)
    try:
        return await teachers.taught(samples)
    finally:
        await teachers.close()


def changed(change: Callable[[list[Any]], Any]) -> Spoil:
    """Changes an answer's list of log-probs, in place."""

    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        change(answer["meta_info"]["input_token_logprobs"])
        return answer

    return spoil


async def test_a_teacher_that_is_the_policy_differs_by_nothing(new_bench: NewBench, engine: EngineProcess) -> None:
    async with opened(engine) as url:
        bench = await new_bench(algorithm={"use_opd": True, "opd_type": "sglang", "opd_teachers": {"itself": url}})
        await bench.task(n=3)
        group, samples = await bench.generated()
    assert group.payload.tokens == tuple(sample.length for sample in samples)
    for sample in samples:
        found = sample.attributes["teacher_log_probs"]
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, sample.log_probs, atol=EXACT)
    assert sum(len(sample.response) for sample in samples) > 20


async def test_held_out_groups_are_asked_of_nobody(new_bench: NewBench) -> None:
    bench = await new_bench(algorithm={"use_opd": True, "opd_type": "sglang", "opd_teachers": {"nobody": "http://127.0.0.1:1"}})
    await bench.task("eval.heldout.1.0")
    _, samples = await bench.generated()
    assert all("teacher_log_probs" not in sample.attributes for sample in samples)


async def test_a_teacher_gives_its_own_log_probs(client: EngineClient, engine: EngineProcess, checkpoint: Checkpoints) -> None:
    everything = np.arange(100, dtype=np.int32)  # the last id of the vocabulary among them, which SGLang shows as 0
    samples = [train_sample(PROMPT.tolist(), response, index=index) for index, response in enumerate(([7], [9, 8, 7], everything, []))]
    async with opened(engine, first=(503, 0, 429)) as url:  # it is asked again while it is away or at fault
        taught = await ask(objective({"one": f"{url}/generate"}), *samples)
    for before, sample in zip(samples, taught, strict=True):
        assert sample.response is before.response
        wanted = log_probs(checkpoint(0).model, sample.prompt, sample.response) if len(sample.response) else np.zeros(0)
        np.testing.assert_allclose(sample.attributes["teacher_log_probs"], wanted, atol=EXACT)


async def test_several_teachers_by_name_and_weight(client: EngineClient, engine: EngineProcess, checkpoint: Checkpoints) -> None:
    def lower(entries: list[Any]) -> None:
        entries[:] = [[None if entry[0] is None else entry[0] - 1.0, *entry[1:]] for entry in entries]

    async with opened(engine) as plain, opened(engine, spoil=changed(lower)) as lowered:
        config = objective({"plain": plain, "lowered": lowered}, opd_teacher_weights={"plain": 3, "lowered": 1})
        named = ({}, {"opd_teacher": "lowered"}, {"opd_teacher": ["plain", "lowered"]}, {"opd_teacher": {"plain": 1, "lowered": 9.0}})
        samples = [train_sample(PROMPT.tolist(), [5, 6, 7], index=index, metadata=metadata) for index, metadata in enumerate(named)]
        taught = await ask(config, *samples)
    own = log_probs(checkpoint(0).model, PROMPT, samples[0].response)
    for sample, gap in zip(taught, (0.25, 1.0, 0.5, 0.9), strict=True):
        np.testing.assert_allclose(sample.attributes["teacher_log_probs"], own - gap, atol=EXACT)


@pytest.mark.parametrize("k", [5, *(pytest.param(k, marks=pytest.mark.extra) for k in (1, 100))])
async def test_a_teacher_gives_its_distribution(client: EngineClient, engine: EngineProcess, checkpoint: Checkpoints, k: int) -> None:
    sample = train_sample(PROMPT.tolist(), [7, 8, 9])
    async with opened(engine) as url:
        config = objective({"one": url, "same": url}, opd_teacher_weights={"one": 3, "same": 1}, opd_top_k=k)
        (taught,) = sample_codec.decode(sample_codec.encode(await ask(config, sample), 1 << 20))
    with torch.no_grad():
        sequence = torch.tensor([*PROMPT.tolist(), 7, 8, 9])[None]
        wanted = checkpoint(0).model(sequence).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
    ids, entries = taught.attributes["teacher_top_ids"], taught.attributes["teacher_top_log_probs"]
    assert ids.shape == entries.shape == (3, 2 * k)
    assert taught.attributes["teacher_top_shares"].tolist() == [0.75, 0.25]
    np.testing.assert_array_equal(ids[:, :k], ids[:, k:])
    np.testing.assert_allclose(entries, wanted.gather(1, torch.tensor(ids).long()).numpy(), atol=EXACT)
    np.testing.assert_allclose(entries[:, :k], wanted.topk(k).values.numpy(), atol=EXACT)
    shares = taught.attributes["teacher_top_shares"][None].repeat(3, 0)
    divergence = top_k_kl(torch.tensor(entries).view(3, 2, k), wanted.gather(1, torch.tensor(ids).long()).view(3, 2, k))
    assert (torch.tensor(shares) * divergence).sum() < 1e-4  # the teacher is the policy


def distribution(entries: list[Any]) -> Spoil:
    def spoil(answer: dict[str, Any]) -> dict[str, Any]:
        answer["meta_info"]["input_top_logprobs"] = entries
        return answer

    return spoil


SPOILT: list[tuple[Spoil, str]] = [
    (changed(lambda entries: entries.clear()), "gave 0 log-probs for 3 response tokens"),
    (changed(lambda entries: entries.__setitem__(-1, [0.5, 7, None])), "gave the log-prob 0.5 at 2; expected a finite number, at most 0"),
    (changed(lambda entries: entries.__setitem__(-2, [None, 6, None])), "the log-prob nan at 1; expected a finite number"),
    (changed(lambda entries: entries.__setitem__(-3, [-1.0, 50, None])), "gave the log-prob of token 50 at 0, not of the response's 5"),
    (changed(lambda entries: entries.__setitem__(-1, "text")), "gave no input_token_logprobs"),
    (lambda answer: {"text": ""}, "gave no input_token_logprobs"),
    (lambda answer: [], "gave no input_token_logprobs"),
]

GOOD = [[-1.0, 3, None]]
SPOILT_DISTRIBUTIONS: list[tuple[Spoil, str]] = [
    (distribution([GOOD, GOOD]), "gave no input_top_logprobs of 1 entries"),
    (distribution([GOOD, GOOD, [[0.5, 3, None]]]), "gave (log-prob, id) [0.5, 3.0] as entry 0 at 2"),
    (distribution([GOOD, [[-1.0, -3, None]], GOOD]), "gave (log-prob, id) [-1.0, -3.0] as entry 0 at 1"),
    (distribution([GOOD, None, GOOD]), "gave no input_top_logprobs of 1 entries"),
]


@pytest.mark.parametrize(("cases", "fields"), [(SPOILT, {}), (SPOILT_DISTRIBUTIONS, {"opd_top_k": 1})], ids=["samples", "distributions"])
async def test_what_a_teacher_gives_is_checked(
    client: EngineClient, engine: EngineProcess, cases: list[tuple[Spoil, str]], fields: dict[str, Any]
) -> None:
    for spoil, words in cases:
        async with opened(engine, spoil=spoil) as url:
            with pytest.raises(TeacherFailed) as error:
                await ask(objective({"odd": url}, **fields), train_sample(PROMPT.tolist(), [5, 6, 7]))
        assert words in str(error.value)
        assert f"sample g/0: teacher odd at {url}:" in str(error.value)


async def test_a_teacher_that_refuses_costs_the_group_alone(new_bench: NewBench, engine: EngineProcess) -> None:
    async with opened(engine, first=(400,)) as url:
        bench = await new_bench(algorithm={"use_opd": True, "opd_type": "sglang", "opd_teachers": {"strict": url}})
        await bench.task(n=1)
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert f"teacher strict at {url}: HTTP 400" in outcome.reason
        await bench.task("g00000008", n=1, metadata={"opd_teacher": "lenient"})
        outcome = await bench.outcome()
        assert isinstance(outcome, Failed)
        assert "no teacher 'lenient' in algorithm.opd_teachers; " in outcome.reason
        await bench.task("g00000009", n=1)
        group, _ = await bench.generated()
        assert group.group == "g00000009"


async def test_a_teacher_that_is_away_is_named_at_the_deadline() -> None:
    config = objective({"away": f"http://user:hush@127.0.0.1:{free_port()}"}, opd_teacher_timeout=3)
    with pytest.raises(DeadlineExceeded, match="teacher away at http://127") as error:
        await ask(config, train_sample(PROMPT.tolist(), [5, 6]))
    assert "the log-probs of sample g/0" in str(error.value)
    assert "ClientConnectorError" in str(error.value)
    assert "hush" not in str(error.value)


async def test_a_key_comes_from_the_environment(engine: EngineProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setenv("TEACHERS", "hush")
    async with opened(engine, headers=seen) as url:
        await ask(objective({"one": url}, opd_teacher_key_variable="TEACHERS"), train_sample(PROMPT.tolist(), [5]))
        await ask(objective({"one": url}), train_sample(PROMPT.tolist(), [5]))
    assert seen == ["Bearer hush", None]
    monkeypatch.delenv("TEACHERS")
    with pytest.raises(ConfigError, match=r"opd_teacher_key_variable.*TEACHERS"):
        await ask(objective({"one": url}, opd_teacher_key_variable="TEACHERS"), train_sample(PROMPT.tolist(), [5]))


async def test_metadata_that_names_no_teacher_is_refused() -> None:
    for named in ([], {}, {"a": 0}, {"a": True}, {"a": float("nan")}, {"b": 1}, 7, ["a", None]):
        with pytest.raises(BadMessage, match=r"metadata\.opd_teacher"):
            await ask(objective({"a": "http://127.0.0.1:1"}), train_sample([1], [5], metadata={"opd_teacher": named}))


@pytest.mark.parametrize(
    "fields",
    [pytest.param({}, id="samples"), pytest.param({"opd_top_k": 8, "opd_kl_coef": 0.0}, id="distributions", marks=pytest.mark.extra)],
)
async def test_distillation_moves_the_student_to_the_teacher(
    client: EngineClient, engine: EngineProcess, checkpoint: Checkpoints, fields: dict[str, Any]
) -> None:
    """A few steps on the student's own samples, with no other reward; the reverse KL per token is measured exactly."""
    student, teacher = copy.deepcopy(checkpoint(1).model), checkpoint(0).model
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    length, count = 8, 16

    def forward(model: torch.nn.Module, sequences: torch.Tensor) -> torch.Tensor:
        return model(sequences).logits[:, len(PROMPT) - 1 : -1].log_softmax(-1)

    def draw() -> torch.Tensor:
        sequences = torch.tensor(PROMPT.tolist()).repeat(count, 1)
        with torch.no_grad():
            for _ in range(length):
                drawn = torch.multinomial(student(sequences).logits[:, -1].softmax(-1), 1, generator=generator)
                sequences = torch.cat([sequences, drawn], 1)
        return sequences

    def distance() -> float:
        with torch.no_grad():
            sequences = draw()
            own, wanted = forward(student, sequences), forward(teacher, sequences)
            return float((own.exp() * (own - wanted)).sum(-1).mean())

    before = distance()
    async with opened(engine) as url:
        config = objective({"teacher": url}, off_policy="none", **fields)
        for _ in range(12):
            sequences = draw()
            responses = sequences[:, len(PROMPT) :]
            whole = forward(student, sequences)
            own = whole.gather(2, responses[..., None])[..., 0]
            samples = [train_sample(PROMPT.tolist(), row.tolist(), index=index) for index, row in enumerate(responses)]
            taught = await ask(config, *samples)
            gaps = [torch.tensor(sample.attributes["teacher_log_probs"]) for sample in taught]
            masks = [torch.ones(length, dtype=torch.bool)] * count
            advantages = distilled(config, [torch.zeros(length, dtype=torch.float64)] * count, list(own.detach()), gaps, masks)
            batch = pack(samples, [1 / (count * length)] * count).with_fields(advantages=spread(samples, advantages, "advantages"))
            rows = [torch.cat([torch.zeros(len(PROMPT) - 1), row, torch.zeros(1)]) for row in own]
            policy = PolicyLoss(config)
            if config.opd_top_k:
                batch = batch.with_fields(**top_k_fields(taught, config.opd_top_k, whole.size(-1)))
                _, spans = places(samples)
                distributions = torch.zeros(len(batch.tokens), whole.size(-1))
                distributions[torch.cat([torch.arange(span.start, span.stop) for span in spans])] = whole.flatten(0, 1)
                found = distributions.gather(1, batch.fields[IDS])
                loss, _ = DistillationLoss(policy)(torch.cat(rows), None, batch, found)
            else:
                loss, _ = policy(torch.cat(rows), None, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert distance() < 0.7 * before
