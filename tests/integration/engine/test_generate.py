"""Generating groups with a real engine: exact log-probs, aborts, continuations, deadlines, refusals, seeds of samples' own, its rate."""

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.rollout import rollout_service
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import GenerationRequest, Span
from services.rollout.engine.transport import EngineError, EngineUnreachable, InvalidRequest
from services.rollout.rollout_service import WINDOW_SECONDS
from shared.hooks.arguments import Arguments
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Sampling
from tests.contract.engine import assert_engine
from tests.integration.engine.bench import NewBench
from tests.integration.engine.conftest import Checkpoints, running_engine
from tests.integration.engine.hall import NewHall
from tests.integration.engine.load import LONG, SAMPLING, asked, generating, prompts, requests, whole
from tests.integration.engine.reference import log_probs
from tests.support.run_config import run_config
from tests.support.tiny_model import PRINTABLE
from tests.support.waiting import until
from tests.support.weights_group import parameters

EXACT = 1e-5


async def idle(client: EngineClient) -> bool:
    """Whether no request is in the engine: it flushes its cache only then."""
    try:
        await asked(client, "POST", "/flush_cache")
    except EngineError as error:
        assert error.status == 400
        return False
    return True


async def test_the_engine_says_what_it_can_do(client: EngineClient) -> None:
    capabilities = client.capabilities
    assert capabilities.release == version("sglang")
    assert capabilities.vocab_size == 4 + len(PRINTABLE)
    assert capabilities.max_sequence == 2046
    assert not capabilities.overlaps


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_log_probs_are_those_of_transformers(client: EngineClient, checkpoint: Checkpoints, temperature: float) -> None:
    lengths = [5, 17, 40, 1, 9, 33, 24, 16]
    prompt = prompts(1)[0]
    group = [GenerationRequest(prompt, length, ignore_eos=True) for length in lengths]
    generations = await client.generate_group(group, Sampling(temperature=temperature, max_new_tokens=1))
    assert [len(generation.tokens) for generation in generations] == lengths
    for generation in generations:
        assert generation.tokens.dtype == np.int32 and generation.log_probs.dtype == np.float32
        assert generation.finish == "length"
        assert generation.spans == (Span(0, len(generation.tokens), 0),)
        reference = log_probs(checkpoint(0).model, prompt, generation.tokens, temperature)
        assert np.abs(reference - generation.log_probs).max() < EXACT
    assert len({generation.tokens[:5].tobytes() for generation in generations}) > 1


async def test_a_sample_ends_with_its_end_token(client: EngineClient) -> None:
    group = [GenerationRequest(prompts(1)[0], 1500) for _ in range(8)]
    stopped = [one for one in await client.generate_group(group, SAMPLING) if one.finish == "stop"]
    assert stopped, "none of 8 samples drew the end token in 1500 draws of about 1 %"
    for generation in stopped:
        assert generation.tokens[-1] == 1 and 1 not in generation.tokens[:-1]
        assert len(generation.log_probs) == len(generation.tokens)


async def test_a_sample_ends_with_a_stop_token(client: EngineClient) -> None:
    stops = list(range(50, 100))
    sampling = Sampling(temperature=1.0, max_new_tokens=500, stop_token_ids=stops)
    (generation,) = await client.generate_group([GenerationRequest(prompts(1)[0], 500)], sampling)
    assert generation.finish == "stop"
    assert not set(generation.tokens[:-1]) & set(stops)


async def test_abort_one_and_go_on(client: EngineClient, checkpoint: Checkpoints) -> None:
    async with generating(client, 12) as running:
        await client.abort(["r-1"])  # SGLang would take r-10 and r-11 along
        result = await running.result()
    assert [generation.finish for _, generation in result] == ["length", "abort", *["length"] * 10]
    prompt, partial = result[1]
    assert 0 < len(partial.tokens) < LONG and partial.spans == (Span(0, len(partial.tokens), 0),)

    context = np.concatenate([prompt, partial.tokens])
    rest = LONG - len(partial.tokens)
    (end,) = await client.generate_group([GenerationRequest(context, rest, ignore_eos=True)], SAMPLING)
    assert end.finish == "length" and len(end.tokens) == rest
    whole = np.concatenate([partial.tokens, end.tokens])
    given = np.concatenate([partial.log_probs, end.log_probs])
    assert np.abs(log_probs(checkpoint(0).model, prompt, whole) - given).max() < EXACT


async def test_abort_all(client: EngineClient) -> None:
    async with generating(client, 4) as running:
        await client.abort_all()
        for _, generation in await running.result():
            assert generation.finish == "abort" and 0 < len(generation.tokens) < LONG


async def test_a_request_aborted_before_it_began(client: EngineClient) -> None:
    await client.pause("retract")
    task = asyncio.create_task(client.generate_group(requests(1), SAMPLING))
    await asyncio.sleep(0)  # sent; it waits in the engine, or on its way there
    await client.resume()
    await until(lambda: aborted(client, task), "the end of an aborted request")
    (generation,) = task.result()
    assert generation.finish == "abort"
    assert len(generation.tokens) == len(generation.log_probs) == sum(end - start for start, end, _ in generation.spans)


async def aborted(client: EngineClient, task: asyncio.Task[object]) -> bool:
    await client.abort_all()
    return task.done()


async def test_what_a_deadline_leaves_behind_is_aborted(client: EngineClient) -> None:
    with pytest.raises(DeadlineExceeded, match=r"/generate .* the engine at unix:\S+ within 0.3 s"):
        await client.generate_group([GenerationRequest(prompts(1)[0], 2000, ignore_eos=True)], SAMPLING, deadline=0.3)
    await until(lambda: idle(client), "the abort of an abandoned request")


async def test_what_a_cancellation_leaves_behind_is_aborted(client: EngineClient) -> None:
    async with generating(client, 2) as running:
        running.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running.task
    await until(lambda: idle(client), "the abort of a cancelled request")


REFUSED = {
    r"token id 100 at 2 is not in \[0, 100\)": GenerationRequest([5, 6, 100], 4),
    r"token id -1 at 0 ": GenerationRequest([-1], 4),
    r"integers \[P\], P at least 1, not float64 \[0\]": GenerationRequest([], 4),
    r"not float64 \[2\]": GenerationRequest(np.array([5.0, 6.0]), 4),  # type: ignore[arg-type]
    r"not int32 \[1, 3\]": GenerationRequest(np.array([[5, 6, 7]], np.int32), 4),
    r"max_new_tokens = 0": GenerationRequest([5], 0),
    r"6 input tokens and 2041 new ones are more than the 2046": GenerationRequest([5] * 6, 2041),
    r"request id 'a\$b'": GenerationRequest([5], 4, rid="a$b"),
    r"request id ''": GenerationRequest([5], 4, rid=""),
}


async def test_what_would_harm_the_engine_is_not_sent_and_a_group_is_checked_as_a_whole(client: EngineClient) -> None:
    for message, request in REFUSED.items():
        with pytest.raises(InvalidRequest, match=message):
            await client.generate_group([GenerationRequest([5], 4), request], SAMPLING)
    with pytest.raises(InvalidRequest, match="without requests"):
        await client.generate_group([], SAMPLING)
    with pytest.raises(InvalidRequest, match="twice"):
        await client.generate_group([GenerationRequest([5], 4, rid="a")] * 2, SAMPLING)
    with pytest.raises(InvalidRequest, match="stop token 100"):
        sampling = Sampling(temperature=1.0, max_new_tokens=4, stop_token_ids=[1, 100])
        await client.generate_group([GenerationRequest([5], 4)], sampling)


async def test_the_longest_sequence_is_generated_in_full(client: EngineClient) -> None:
    longest = client.capabilities.max_sequence
    prompt = prompts(1, longest - 20)[0]
    (generation,) = await client.generate_group([GenerationRequest(prompt, 20, ignore_eos=True)], SAMPLING)
    assert generation.finish == "length" and len(generation.tokens) == 20


async def test_the_engines_refusal_is_quoted(client: EngineClient) -> None:
    sampling = Sampling.model_construct(**(SAMPLING.model_dump() | {"top_p": 7.0}))
    with pytest.raises(EngineError, match=r"/generate \(HTTP 400\): .*top_p") as raised:
        await client.generate_group([GenerationRequest([5], 4)], sampling)
    assert raised.value.status == 400
    await asked(client, "GET", "/server_info")


async def test_prefixes_are_shared_within_a_version_only(client: EngineClient, checkpoint: Checkpoints) -> None:
    request = GenerationRequest(prompts(1, 64)[0], 4)
    await whole(client, request)
    again = await whole(client, request)
    assert again.cached_tokens == 63
    await client.set_weight_version(1)
    next_version = await whole(client, request)
    assert next_version.cached_tokens == 0


async def test_a_pause_holds_new_requests_back(client: EngineClient) -> None:
    await client.pause("in_place")
    task = asyncio.create_task(client.generate_group(requests(1, 4), SAMPLING))
    await asked(client, "GET", "/server_info")
    assert not task.done()
    await client.resume()
    (generation,) = await task
    assert generation.finish == "length"


async def test_nobody_answers(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachable, match=r"unix:\S+/server_info: UnixClientConnectorError"):
        await EngineClient.connect(tmp_path)


async def test_a_control_call_has_a_deadline(client: EngineClient) -> None:
    with pytest.raises(DeadlineExceeded, match=r"GET /metrics did not come from the engine .* within 1e-05 s"):
        await client.generated_tokens(deadline=1e-5)


SEEDED = Sampling(temperature=1.0, top_p=0.95, max_new_tokens=24)
PROMPTS = [np.arange(5, 5 + length, dtype=np.int32) for length in (3, 8, 11)]
N = 4

Drawn = list[list[list[int]]]
"""The tokens of each prompt's samples."""


def group(prompt: int) -> list[GenerationRequest]:
    return [GenerationRequest(PROMPTS[prompt], 24, ignore_eos=True, seed=42 + index) for index in range(N)]


async def in_company(client: EngineClient) -> Drawn:
    """All groups at once: the tokens of each sample."""
    drawn = await asyncio.gather(*(client.generate_group(group(prompt), SEEDED) for prompt in range(len(PROMPTS))))
    return [[generation.tokens.tolist() for generation in generations] for generations in drawn]


async def one_by_one(client: EngineClient) -> Drawn:
    """Each sample alone, the last first, and each of them cut in two: the second request continues the first one's tokens."""
    drawn: Drawn = [[[] for _ in range(N)] for _ in PROMPTS]
    for prompt in reversed(range(len(PROMPTS))):
        for index, request in reversed(list(enumerate(group(prompt)))):
            [first] = await client.generate_group([replace(request, max_new_tokens=9)], SEEDED)
            continued = np.concatenate([request.tokens, first.tokens])
            [rest] = await client.generate_group([replace(request, rid=f"{request.rid}r", tokens=continued, max_new_tokens=15)], SEEDED)
            drawn[prompt][index] = [*first.tokens.tolist(), *rest.tokens.tolist()]
    return drawn


async def drawn_by(engine: EngineProcess, draw: Callable[[EngineClient], Awaitable[Drawn]]) -> Drawn:
    async with await EngineClient.connect(engine.receiver) as client:
        return await draw(client)


@pytest.mark.extra(each=True)
def test_seeds_draw_the_same_samples_in_two_engines(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Two engines with other seeds of their own; the first one's requests in company, the second one's alone and interrupted."""
    found = []
    for name, seed, draw in (("first", 1, in_company), ("second", 2, one_by_one)):
        (tmp_path / name).mkdir()
        flags: dict[str, Any] = {"enable-deterministic-inference": True, "random-seed": seed}
        with running_engine(checkpoint(0).path, tmp_path / name, flags) as engine:
            found.append(asyncio.run(drawn_by(engine, draw)))
    assert found[0] == found[1]
    assert all(len({tuple(tokens) for tokens in samples}) == N for samples in found[0])  # the samples of a group differ


@pytest.fixture(scope="session")
def seeded_engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("seeded"), {"enable-deterministic-inference": True}) as process:
        yield process


@pytest.mark.extra
@pytest.mark.parametrize("engine_name", ["seeded_engine"])
async def test_a_session_that_asks_again_gets_another_answer_and_an_evaluations_client_by_its_seed(hall: NewHall) -> None:
    room, texts = await hall(), {}
    for name, fields, seed in (("trained", {}, 5), ("again", {}, None), ("evaluated", {"evaluation": True}, 5)):
        played = await room.session(seed=7, **fields)
        asked: dict[str, Any] = {"model": "0", "messages": [{"role": "user", "content": "x"}], "seed": seed}
        async with played.client(room.urls[0]) as client:
            answers = [await client.chat.completions.create(**asked) for _ in range(3)]
        texts[name] = [one.choices[0].message.content for one in answers]
    assert len(set(texts["trained"])) == 3 and texts["again"] == texts["trained"], "a session's own seeds, the same in each life"
    assert len(set(texts["evaluated"])) == 1 and texts["evaluated"][0] not in texts["trained"]


async def test_without_the_flag_samples_have_no_seed(client: EngineClient) -> None:
    once, again = [await in_company(client) for _ in range(2)]
    assert once != again


@pytest.mark.parametrize(
    ("sglang", "first"),
    [
        ({}, None),
        ({"enable-deterministic-inference": False}, None),
        ({"enable-deterministic-inference": True}, 7),
        ({"--enable_deterministic_inference": True}, 7),
        ({"rl-on-policy-target": "fsdp"}, 7),
        ({"enable-deterministic-inference": False, "rl-on-policy-target": "fsdp"}, 7),
    ],
)
def test_seeds_follow_from_the_engines_flags(tmp_path: Path, sglang: dict[str, Any], first: int | None) -> None:
    config = run_config(tmp_path, data={"rollout_seed": 7}, rollout={"sglang": sglang})
    assert [config.sample_seed(index) for index in range(3)] == ([None] * 3 if first is None else [7, 8, 9])
    assert Arguments(config).sglang_enable_deterministic_inference is (first is not None)


SAMPLES, TOKENS = 4, 400


@pytest.mark.extra
async def test_tokens_count_as_they_are_drawn_and_the_rate_adds_up_to_them(new_bench: NewBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_service, "RATE_SECONDS", 0.2)
    desk = await new_bench(rollout={"rollout_max_response_len": TOKENS})
    gauges, seen = desk.service.metrics.values, list[tuple[float, float]]()
    set_gauge = desk.service.metrics.set

    def noted(name: str, value: float, **labels: object) -> None:
        set_gauge(name, value)
        if name == "generated_tokens_per_s":
            seen.append((time.monotonic(), value))

    monkeypatch.setattr(desk.service.metrics, "set", noted)
    desk.working.append(asyncio.create_task(desk.rollout.measure()))
    await until(lambda: seen, "the engine's first count")
    for _ in range(3):  # a group that draws its end tokens early is over before it is seen
        await desk.task(n=SAMPLES, sampling=Sampling(temperature=1.0, max_new_tokens=TOKENS))
        done = desk.rollout.tokens
        await until(lambda done=done: max(gauges["generated_tokens"], desk.rollout.tokens) > done, "tokens", 240)
        under_way = desk.rollout.tokens == done
        await desk.client.pause("retract")  # as in a push
        await desk.client.resume()
        _, samples = await desk.generated()
        if under_way:
            break
    else:
        raise AssertionError("no tokens were counted before their group had ended")
    await until(lambda: gauges["generated_tokens"] == desk.rollout.tokens, "the count of the samples that came back", 60)
    await until(lambda: gauges["generated_tokens_per_s"] == 0, "an engine at rest", 60)
    assert len(samples) == SAMPLES
    total = desk.rollout.tokens
    steps = [(now - before, rate) for (before, _), (now, rate) in itertools.pairwise(seen)]
    coarse = max(seconds for seconds, _ in steps) / WINDOW_SECONDS  # a busy machine reads late
    assert sum(seconds * rate for seconds, rate in steps) == pytest.approx(total, rel=0.05 + coarse), "rate times time"
    assert max(rate for _, rate in seen) <= total / WINDOW_SECONDS, "no window holds more than all"


async def test_the_contract_of_an_engine(client: EngineClient, checkpoint: Checkpoints):
    await assert_engine(client, parameters(checkpoint(1).model))
