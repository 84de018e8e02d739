"""Generating groups with a real engine: exact log-probs, aborts, continuations, deadlines, refusals."""

import asyncio
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest, Span
from services.rollout.engine.transport import EngineError, EngineUnreachable, InvalidRequest
from shared.runtime.errors import DeadlineExceeded
from shared.schema.messages import Sampling
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.load import LONG, SAMPLING, asked, generating, prompts, requests, whole
from tests.integration.engine.reference import log_probs
from tests.support.tiny_model import PRINTABLE
from tests.support.waiting import until

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
