"""Pushing weights into a running engine: over gloo and from disk, with requests running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from services.rollout.engine.client import EngineClient
from services.rollout.engine.errors import EngineError, InvalidRequest
from services.rollout.engine.generation import GenerationRequest, Span
from tests.integration.engine.conftest import Checkpoints
from tests.integration.engine.load import LONG, SAMPLING, generating, prompts, requests
from tests.integration.engine.reference import log_probs, log_probs_with_kept_cache
from tests.support.weights_group import WeightsGroup

EXACT = 1e-5


@pytest.fixture
async def group(client: EngineClient) -> AsyncIterator[WeightsGroup]:
    """This process and the engine."""
    group = await WeightsGroup.join(client, "trainer")
    yield group
    await client.destroy_weights_group("trainer")
    group.leave()


async def serves(client: EngineClient, checkpoints: Checkpoints, seed: int, version: int) -> None:
    """Assert that a new request is drawn by ``checkpoints(seed)`` and labelled with ``version``."""
    prompt = prompts(1)[0]
    (generation,) = await client.generate_group([GenerationRequest(prompt, 24, ignore_eos=True)], SAMPLING)
    assert generation.spans == (Span(0, 24, version),)
    assert np.abs(log_probs(checkpoints(seed).model, prompt, generation.tokens) - generation.log_probs).max() < EXACT


async def test_push_in_place(client: EngineClient, group: WeightsGroup, checkpoint: Checkpoints) -> None:
    """Running requests keep the old weights' keys and values, exactly; requests that begin later have none of them."""
    old, new = checkpoint(0).model, checkpoint(1).model
    async with generating(client, 4) as running:
        await client.pause("in_place")
        await group.push(client, new, version=1)
        assert await client.served_version() == 1
        await client.resume()
        result = await running.result()
    for prompt, generation in result:
        assert generation.finish == "length" and len(generation.tokens) == LONG
        boundary = generation.spans[0].end
        assert generation.spans == (Span(0, boundary, 0), Span(boundary, LONG, 1))
        kept = log_probs_with_kept_cache(old, new, prompt, generation.tokens, boundary)
        assert np.abs(kept - generation.log_probs).max() < EXACT
        # Not what the new weights say of the same text: that is what keeping the cache costs.
        assert np.abs(log_probs(new, prompt, generation.tokens) - generation.log_probs)[boundary:].max() > 1e-2
    await serves(client, checkpoint, 1, 1)  # with the first prompt again: of its prefix nothing is reused


async def test_push_between_attempts(client: EngineClient, group: WeightsGroup, checkpoint: Checkpoints) -> None:
    """Aborted by the pause, resubmitted after the push: the second part is the new weights', given the whole text."""
    async with generating(client, 3) as running:
        await client.pause("abort")
        partials = await running.result()
    await group.push(client, checkpoint(1).model, version=1)
    await client.resume()
    again = []
    for prompt, partial in partials:
        assert partial.finish == "abort" and 0 < len(partial.tokens) < LONG
        context = np.concatenate([prompt, partial.tokens])
        again.append(GenerationRequest(context, LONG - len(partial.tokens), ignore_eos=True))
    for request, generation in zip(again, await client.generate_group(again, SAMPLING), strict=True):
        assert generation.spans == (Span(0, request.max_new_tokens, 1),)
        reference = log_probs(checkpoint(1).model, np.asarray(request.tokens), generation.tokens)
        assert np.abs(reference - generation.log_probs).max() < EXACT


async def test_two_pushes_into_one_sample(client: EngineClient, group: WeightsGroup, checkpoint: Checkpoints) -> None:
    async with generating(client, 2) as running:
        for version in (1, 2):
            await client.pause("in_place")
            await group.push(client, checkpoint(version).model, version=version)
            await client.resume()
            await client.server_info()  # a turn of the engine's loop lies between
        result = await running.result()
    for _, generation in result:
        versions = [span.version for span in generation.spans]
        assert versions in ([0, 1, 2], [0, 2])  # 2 alone if no token was drawn in between
        assert generation.spans[0].start == 0 and generation.spans[-1].end == LONG
        assert all(left.end == right.start for left, right in zip(generation.spans, generation.spans[1:], strict=False))


async def test_half_loaded_weights_draw_for_nobody(client: EngineClient, group: WeightsGroup, checkpoint: Checkpoints) -> None:
    parameters = list(checkpoint(1).model.named_parameters())
    async with generating(client, 2) as running:
        await client.pause("in_place")
        await client.begin_weight_update()
        await group.send(client, parameters[:5])
        await client.resume()
        with pytest.raises(InvalidRequest, match="half-loaded"):
            await client.generate_group(requests(1), SAMPLING)
        with pytest.raises(EngineError, match="half-loaded weights while it generated"):
            await running.task
    await group.push(client, checkpoint(1).model, version=1)
    await serves(client, checkpoint, 1, 1)


async def test_a_trainer_that_leaves_in_a_broadcast(client: EngineClient, checkpoint: Checkpoints) -> None:
    """The engine says so, stays, and takes a whole push over the next group."""
    group = await WeightsGroup.join(client, "trainer")
    await client.begin_weight_update()
    receiving = asyncio.create_task(client.receive_bucket(["model.norm.weight"], ["float32"], [[64]], "trainer", deadline=60))
    await asyncio.sleep(0.5)  # let it enter the broadcast; should it not have, its error is the same
    group.leave()
    with pytest.raises(EngineError, match=r"/update_weights_from_distributed \(HTTP 400\): .*Connection closed by peer"):
        await receiving
    await client.destroy_weights_group("trainer")
    second = await WeightsGroup.join(client, "trainer-2")
    await second.push(client, checkpoint(1).model, version=1)
    await serves(client, checkpoint, 1, 1)
    await client.destroy_weights_group("trainer-2")
    second.leave()


async def test_pushes_that_would_kill_the_engine_are_not_sent(client: EngineClient, group: WeightsGroup) -> None:
    await client.begin_weight_update()
    bucket = (["model.norm.weight"], ["float32"], [[64]])
    with pytest.raises(InvalidRequest, match=r"'nobody' was not joined; .*'trainer'"):
        await client.receive_bucket(*bucket, "nobody")
    with pytest.raises(InvalidRequest, match="dtype 'float31'"):
        await client.receive_bucket(["a"], ["float31"], [[64]], "trainer")
    with pytest.raises(InvalidRequest, match="2 names, 1 dtypes and 2 shapes"):
        await client.receive_bucket(["a", "b"], ["float32"], [[64], [64]], "trainer")
    with pytest.raises(InvalidRequest, match="b: starts at byte 6"):
        await client.receive_bucket(["a", "b"], ["bfloat16", "float32"], [[3], [4]], "trainer")
    with pytest.raises(InvalidRequest, match="'trainer'"):
        await client.init_weights_group("trainer", master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, backend="gloo")
    await client.pause("in_place")
    with pytest.raises(InvalidRequest, match="flush while paused in_place"):
        await client.receive_bucket(*bucket, "trainer", flush=True)
    await client.resume()
    await client.end_weight_update()
    await client.health()


async def test_flush_with_a_push_while_requests_wait(client: EngineClient, group: WeightsGroup, checkpoint: Checkpoints) -> None:
    """From 0.5.21 on it works, and makes a retracted request exact although prefixes are kept; before, it kills."""
    async with generating(client, 2) as running:
        await client.pause("retract")
        await client.begin_weight_update()
        parameters = list(checkpoint(1).model.named_parameters())
        if not client.capabilities.weight_sessions:
            with pytest.raises(InvalidRequest, match="flush while paused retract"):
                await client.receive_bucket(["model.norm.weight"], ["float32"], [[64]], "trainer", version=1, flush=True)
            return
        await group.send(client, parameters, version=1, flush=True)
        await client.end_weight_update()
        await client.resume()
        for prompt, generation in await running.result():
            boundary = generation.spans[0].end
            reference = log_probs(checkpoint(1).model, prompt, generation.tokens)
            assert np.abs(reference - generation.log_probs)[boundary:].max() < EXACT


async def test_load_from_disk(client: EngineClient, checkpoint: Checkpoints) -> None:
    await client.update_weights_from_disk(str(checkpoint(2).path), 3)
    assert await client.served_version() == 3
    await serves(client, checkpoint, 2, 3)


async def test_load_from_a_place_without_weights(client: EngineClient, checkpoint: Checkpoints) -> None:
    with pytest.raises(EngineError, match=r"/update_weights_from_disk \(HTTP 400\)"):
        await client.update_weights_from_disk("/nonexistent", 4)
    await client.update_weights_from_disk(str(checkpoint(2).path), 4)
    await serves(client, checkpoint, 2, 4)


async def test_what_an_overlapping_engine_had_on_its_way(overlapping_client: EngineClient, checkpoint: Checkpoints) -> None:
    """Paused in place it counts one token of the old weights as the new version's; the client knows."""
    old, new = checkpoint(0).model, checkpoint(1).model
    assert overlapping_client.capabilities.overlaps
    group = await WeightsGroup.join(overlapping_client, "trainer")
    async with generating(overlapping_client, 4) as running:
        await overlapping_client.pause("in_place")
        await group.push(overlapping_client, new, version=1)
        await overlapping_client.resume()
        result = await running.result()
    await overlapping_client.destroy_weights_group("trainer")
    group.leave()
    for prompt, generation in result:
        boundary = generation.spans[0].end
        assert generation.spans == (Span(0, boundary, 0), Span(boundary, LONG, 1))
        kept = log_probs_with_kept_cache(old, new, prompt, generation.tokens, boundary)
        assert np.abs(kept - generation.log_probs).max() < EXACT


async def test_push_retracted(overlapping_client: EngineClient, checkpoint: Checkpoints) -> None:
    """Without kept prefixes, what is drawn after the push is exactly the new weights', given the whole text."""
    old, new = checkpoint(0).model, checkpoint(1).model
    assert not overlapping_client.capabilities.prefix_cache
    group = await WeightsGroup.join(overlapping_client, "trainer")
    async with generating(overlapping_client, 4) as running:
        await overlapping_client.pause("retract")
        await group.push(overlapping_client, new, version=1)
        await overlapping_client.resume()
        result = await running.result()
    await overlapping_client.destroy_weights_group("trainer")
    group.leave()
    for prompt, generation in result:
        assert generation.finish == "length" and generation.retractions == 1
        boundary = generation.spans[0].end
        assert generation.spans == (Span(0, boundary, 0), Span(boundary, LONG, 1))
        assert np.abs(log_probs(old, prompt, generation.tokens) - generation.log_probs)[:boundary].max() < EXACT
        assert np.abs(log_probs(new, prompt, generation.tokens) - generation.log_probs)[boundary:].max() < EXACT
