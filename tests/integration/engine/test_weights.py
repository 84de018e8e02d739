"""Pushing weights into a running engine: over gloo and from disk, with requests running."""

import asyncio
import functools
import itertools
import os
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

from services.rollout.engine.engine_client import EngineClient, PauseMode
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import GenerationRequest, Span, group_body
from services.rollout.engine.receiver_client import ReceiverError
from services.rollout.engine.transport import EngineError
from services.rollout.in_flight import Partial
from shared.process.child_process import descendants
from shared.runtime.errors import MyxoError
from shared.transfer import digest
from tests.integration.engine.conftest import Checkpoints, fresh_client, running_engine
from tests.integration.engine.load import LONG, SAMPLING, asked, generating, load, prompts, requests, served_version, weights_state
from tests.integration.engine.reference import log_probs, log_probs_with_kept_cache
from tests.support import weights_group
from tests.support.service_process import ROOT
from tests.support.waiting import until
from tests.support.weights_group import JOIN_SECONDS, Pusher, WeightsGroup, parameters

pytestmark = pytest.mark.timeout(600)

EXACT = 1e-5

NUMBERS = itertools.count()


def name() -> str:
    """A channel's, that nobody has had."""
    return f"channel-{next(NUMBERS)}"


@pytest.fixture
async def pusher(client: EngineClient) -> AsyncIterator[Pusher]:
    """This process and the engine, in one channel."""
    async with Pusher.over(client, names=[name()]) as pusher:
        yield pusher


async def serves(client: EngineClient, checkpoints: Checkpoints, seed: int, version: int) -> None:
    """Assert that a new request is drawn by ``checkpoints(seed)`` and labelled with ``version``."""
    prompt = prompts(1)[0]
    (generation,) = await client.generate_group([GenerationRequest(prompt, 24, ignore_eos=True)], SAMPLING)
    assert generation.spans == (Span(0, 24, version),)
    assert np.abs(log_probs(checkpoints(seed).model, prompt, generation.tokens) - generation.log_probs).max() < EXACT


async def test_push_in_place(client: EngineClient, pusher: Pusher, checkpoint: Checkpoints) -> None:
    """Running requests keep the old weights' keys and values, exactly; requests that begin later have none of them."""
    old, new = checkpoint(0).model, checkpoint(1).model
    async with generating(client, 4) as running:
        await client.pause("in_place")
        await pusher.push(new, 1)
        assert await served_version(client) == "1"
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


@pytest.mark.extra
async def test_push_between_attempts(client: EngineClient, pusher: Pusher, checkpoint: Checkpoints) -> None:
    """Aborted by the pause, resubmitted after the push: the second part is the new weights', given the whole text."""
    async with generating(client, 3) as running:
        await client.pause("abort")
        partials = await running.result()
    await pusher.push(checkpoint(1).model, 1)
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


@pytest.mark.extra
async def test_two_pushes_into_one_sample(client: EngineClient, pusher: Pusher, checkpoint: Checkpoints) -> None:
    async with generating(client, 2) as running:
        for version in (1, 2):
            await client.pause("in_place")
            await pusher.push(checkpoint(version).model, version)
            await client.resume()
            await asked(client, "GET", "/server_info")  # a turn of the engine's loop lies between
        result = await running.result()
    for _, generation in result:
        versions = [span.version for span in generation.spans]
        assert versions in ([0, 1, 2], [0, 2])  # 2 alone if no token was drawn in between
        assert generation.spans[0].start == 0 and generation.spans[-1].end == LONG
        assert all(left.end == right.start for left, right in zip(generation.spans, generation.spans[1:], strict=False))


@pytest.mark.parametrize("sent", [2, pytest.param(0, marks=pytest.mark.extra)])
async def test_a_source_that_falls_silent(client: EngineClient, checkpoint: Checkpoints, sent: int) -> None:
    """It lives, but sends no more: the engine gives up at the deadline and continues, with what it had if nothing had come yet."""
    async with Pusher.over(client, names=[name()]) as pusher:
        with pytest.raises(ReceiverError, match=rf"rank 0: bucket {sent} did not come from the source of channel") as silent:
            await pusher.send(parameters(checkpoint(1).model), 1, only=slice(sent), deadline=2)
        assert silent.value.touched == bool(sent)
        await asked(client, "GET", "/server_info")
        assert (await weights_state(client)).channels == frozenset()  # what is still on its way there belongs to nobody
    if not sent:
        await serves(client, checkpoint, 0, 0)


async def test_a_push_that_is_called_off(client: EngineClient, pusher: Pusher, checkpoint: Checkpoints) -> None:
    async with generating(client, 2) as running:
        await client.pause("in_place")
        sending = asyncio.create_task(pusher.send(parameters(checkpoint(1).model), 1, only=slice(0), deadline=JOIN_SECONDS))
        while not sending.done():
            await client.receivers.abort()
            await asyncio.sleep(0.05)
        with pytest.raises(ReceiverError, match="called off") as off:
            await sending
        assert not off.value.touched
        await client.resume()
        assert all(one.spans == (Span(0, LONG, 0),) for _, one in await running.result())


@pytest.mark.extra
async def test_channels_that_others_never_join(client: EngineClient, checkpoint: Checkpoints) -> None:
    """The engine generates meanwhile, says who is missing, and is free for other channels."""
    lonely = WeightsGroup(name(), 3)
    await client.join_channels([lonely.address], 1, timeout=JOIN_SECONDS)
    await serves(client, checkpoint, 0, 0)
    await client.begin_weight_update()
    with pytest.raises(ReceiverError, match="did not come from the other engines of channel"):
        await client.receive(1, 1, [lonely.name], deadline=1)
    await client.end_weight_update()
    async with Pusher.over(client, names=[name()]) as pusher:
        await pusher.push(checkpoint(1).model, 1)
    await serves(client, checkpoint, 1, 1)
    lonely.die()


async def test_channels_side_by_side(client: EngineClient, checkpoint: Checkpoints) -> None:
    """As from the stages of a pipeline. A push of a part keeps what is known of the rest, and a check sees every element."""
    new = parameters(checkpoint(1).model)
    assert (await weights_state(client)).digest == ""  # loaded from disk, so nobody has told
    async with Pusher.over(client, names=[name(), name()]) as pusher:
        (taken,) = await pusher.push(new, 1)
        assert taken.digest == pusher.digest and taken.bytes >= sum(tensor.nbytes for tensor in new.values())
        await serves(client, checkpoint, 1, 1)
        newest = parameters(checkpoint(2).model)
        (taken,) = await pusher.push({one: newest[one] for one in list(newest)[::3]}, 2)
        mixed = {one: (newest if place % 3 == 0 else new)[one].detach().clone() for place, one in enumerate(new)}
        assert taken.digest == pusher.digest == (await weights_state(client)).digest
        (checked,) = await pusher.send(mixed, 2, check=True)
        assert checked.differences == {} and checked.digest == taken.digest
        for _ in range(2):  # the second time by the plan that the first has made
            (taken,) = await pusher.push(newest, 3)
        tampered = {one: tensor.detach().clone() for one, tensor in newest.items()}
        tampered["model.layers.1.self_attn.k_proj.weight"][3, 5] += 1
        tampered["model.norm.weight"][:] = -tampered["model.norm.weight"]
        (checked,) = await pusher.send(tampered, 3, check=True)
        assert checked.differences == {"model.layers.1.self_attn.k_proj.weight": 1, "model.norm.weight": 64}
        assert (await weights_state(client)).digest == taken.digest
        await serves(client, checkpoint, 2, 3)


async def test_engines_side_by_side(client: EngineClient, overlapping_client: EngineClient, checkpoint: Checkpoints) -> None:
    async with Pusher.over(client, overlapping_client, names=[name()]) as pusher:
        taken = await pusher.push(checkpoint(1).model, 1)
        assert {one.digest for one in taken} == {pusher.digest}
        await serves(client, checkpoint, 1, 1)
        await serves(overlapping_client, checkpoint, 1, 1)


@pytest.fixture
def engine_of_stages(checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineProcess]:
    """An engine whose layers are in two stages, each of which is cut in two."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0|0|0")
    with running_engine(checkpoint(0).path, tmp_path, {"tp-size": 2, "pp-size": 2}) as process:
        yield process


@pytest.mark.extra
async def test_an_engine_of_two_stages(engine_of_stages: EngineProcess, checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks receive the whole under load, and each keeps its part of its layers; what was aborted is of the old weights."""
    small = functools.partial(weights_group.manifest_of, bucket_bytes=4096)  # far more buckets than buffers: all ranks have to load at once
    monkeypatch.setattr(weights_group, "manifest_of", small)
    channel = WeightsGroup(name(), 5)
    async with fresh_client(engine_of_stages, checkpoint(0)) as client:
        assert client.capabilities.ranks == 4
        await client.join_channels([channel.address], 1, timeout=JOIN_SECONDS)
        await asyncio.to_thread(channel.join, JOIN_SECONDS)
        pusher = Pusher([client], [channel])
        for version in (1, 2):
            under_way = requests(6)
            running = asyncio.create_task(client.generate_group(under_way, SAMPLING))
            await until(lambda: _used(client, 6 * 20), "requests in decode")
            await client.pause("abort")
            (taken,) = await pusher.push(checkpoint(version).model, version)
            await client.resume()
            assert taken.digest == pusher.digest
            for prompt, generation in zip([np.asarray(one.tokens) for one in under_way], await running, strict=True):
                assert generation.finish == "abort"
                assert generation.spans and {of for _, _, of in generation.spans} == {version - 1}
                expected = log_probs(checkpoint(version - 1).model, prompt, generation.tokens)
                np.testing.assert_allclose(generation.log_probs, expected, atol=1e-4)
            await serves(client, checkpoint, version, version)
        (checked,) = await pusher.send(pusher.sent, 2, check=True)
        assert checked.differences == {}
        tampered = {one: tensor.detach().clone() for one, tensor in pusher.sent.items()}
        for one in (tampered["model.layers.0.mlp.down_proj.weight"], tampered["model.layers.1.mlp.down_proj.weight"]):
            one[3, 5] += 1
        (checked,) = await pusher.send(tampered, 2, check=True)
        assert checked.differences == {f"model.layers.{layer}.mlp.down_proj.weight": 1 for layer in (0, 1)}
        await client.update_weights_from_disk(str(checkpoint(1).path), 3)
        await serves(client, checkpoint, 1, 3)
        own = [one.pid for one in descendants(engine_of_stages.pid) if "schedul" in one.name]
        [later, *_] = [pid for pid in own if b"PP1" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        os.kill(later, signal.SIGSTOP)
        pushing = asyncio.create_task(pusher.push(checkpoint(2).model, 4))
        await asyncio.sleep(1)  # it may have begun in the first stage, or be about to: either way it ends
        os.kill(later, signal.SIGKILL)
        with pytest.raises(MyxoError):
            await pushing
    channel.die()


async def _used(client: EngineClient, tokens: int) -> bool:
    return (await load(client)).used_tokens > tokens


async def test_commands_that_cannot_be_carried_out(client: EngineClient, pusher: Pusher) -> None:
    """Each is refused with its reason, and nothing has happened."""
    await client.begin_weight_update()
    with pytest.raises(ReceiverError, match=r"'nobody'.* has joined \['channel-\d+'\]"):
        await client.receive(1, 1, ["nobody"], deadline=30)
    await client.join_channels(
        [pusher.channels[0].address.model_copy(update={"name": "other", "backend": "carrier pigeon"})], 1, timeout=30
    )
    with pytest.raises(ReceiverError, match="backend 'carrier pigeon', not 'gloo' or 'nccl'") as refused:
        await client.receive(1, 1, ["other"], deadline=30)
    assert not refused.value.touched
    await client.end_weight_update()
    await asked(client, "GET", "/server_info")


async def test_what_was_loaded_by_other_means(client: EngineClient, pusher: Pusher, checkpoint: Checkpoints) -> None:
    """The engine takes the word of who has checked it, until something else is loaded."""
    await pusher.push(checkpoint(1).model, 1)
    known = dict(pusher.known)
    await client.update_weights_from_disk(str(checkpoint(1).path), 2)
    assert (await weights_state(client)).digest == ""
    assert await client.adopt(2, known) == pusher.digest
    state = await weights_state(client)
    assert (state.version, state.digest) == (2, digest.version_digest(known))
    await pusher.push({"model.norm.weight": checkpoint(2).model.model.norm.weight}, 3)
    assert (await weights_state(client)).digest == pusher.digest


async def test_load_from_a_place_without_weights(client: EngineClient, checkpoint: Checkpoints) -> None:
    with pytest.raises(EngineError, match=r"/update_weights_from_disk \(HTTP 400\)"):
        await client.update_weights_from_disk("/nonexistent", 4)
    await client.update_weights_from_disk(str(checkpoint(2).path), 4)
    await serves(client, checkpoint, 2, 4)


async def test_what_an_overlapping_engine_had_on_its_way(overlapping_client: EngineClient, checkpoint: Checkpoints) -> None:
    """Paused in place it counts one token of the old weights as the new version's; the client knows."""
    old, new = checkpoint(0).model, checkpoint(1).model
    assert overlapping_client.capabilities.overlaps
    async with Pusher.over(overlapping_client, names=[name()]) as pusher, generating(overlapping_client, 4) as running:
        await overlapping_client.pause("in_place")
        await pusher.push(new, 1)
        await overlapping_client.resume()
        result = await running.result()
    for prompt, generation in result:
        boundary = generation.spans[0].end
        assert generation.spans == (Span(0, boundary, 0), Span(boundary, LONG, 1))
        kept = log_probs_with_kept_cache(old, new, prompt, generation.tokens, boundary)
        assert np.abs(kept - generation.log_probs).max() < EXACT


async def test_push_retracted(overlapping_client: EngineClient, checkpoint: Checkpoints) -> None:
    """Without kept prefixes, what is drawn after the push is exactly the new weights', given the whole text."""
    old, new = checkpoint(0).model, checkpoint(1).model
    async with Pusher.over(overlapping_client, names=[name()]) as pusher, generating(overlapping_client, 4) as running:
        await overlapping_client.pause("retract")
        await pusher.push(new, 1)
        await overlapping_client.resume()
        result = await running.result()
    for prompt, generation in result:
        assert generation.finish == "length" and generation.retractions == 1
        boundary = generation.spans[0].end
        assert generation.spans == (Span(0, boundary, 0), Span(boundary, LONG, 1))
        assert np.abs(log_probs(old, prompt, generation.tokens) - generation.log_probs)[:boundary].max() < EXACT
        assert np.abs(log_probs(new, prompt, generation.tokens) - generation.log_probs)[boundary:].max() < EXACT


@pytest.fixture(scope="module")
def older_engine(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine that overlaps its steps and, as SGLang before 0.5.20, names the version of a request's end alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests/support/older_engine"))
        with running_engine(checkpoint(0).path, tmp_path_factory.mktemp("older"), {"disable-overlap-schedule": False}) as process:
            yield process


@pytest.mark.extra
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_every_token_has_its_version_where_sglang_names_that_of_the_end_alone(
    older_engine: EngineProcess, checkpoint: Checkpoints, mode: PauseMode
) -> None:
    old, new, live = checkpoint(0).model, checkpoint(1).model, Partial()
    async with fresh_client(older_engine, checkpoint(0)) as client:
        body = group_body(requests(1, 4), SAMPLING, client.capabilities, "plain")
        [plain] = await client.transport.post("/generate", body, 60, "nothing")
        assert "weight_versions" not in plain["meta_info"]
        async with Pusher.over(client, names=[name()]) as pusher, generating(client, 4) as running:
            prompt = prompts(5)[4]
            streaming = asyncio.create_task(stream(client, GenerationRequest(prompt, LONG, ignore_eos=True), live))
            while not len(live.tokens):
                await asyncio.sleep(0.01)
            await client.pause(mode)
            await pusher.push(new, 1)
            await client.resume()
            result = [(text, one.tokens, one.log_probs, [*map(tuple, one.spans)]) for text, one in await running.result()]
            await streaming
        for text, tokens, drawn, spans in [*result, (prompt, live.tokens, live.log_probs, live.segments)]:
            boundary = spans[0][1]
            assert spans == [(0, boundary, 0), (boundary, LONG, 1)]
            if mode == "in_place":
                expected = log_probs_with_kept_cache(old, new, text, tokens, boundary)
            else:
                expected = np.concatenate([log_probs(old, text, tokens)[:boundary], log_probs(new, text, tokens)[boundary:]])
            assert np.abs(expected - drawn).max() < EXACT
        await serves(client, checkpoint, 1, 1)


async def stream(client: EngineClient, request: GenerationRequest, into: Partial) -> None:
    async for piece in client.generate_live(request, SAMPLING):
        into.extend(piece, LONG)


async def test_clients_connect_though_the_directory_of_the_last_version_has_gone(
    client: EngineClient, chosen_engine: EngineProcess, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    version = shutil.copytree(checkpoint(1).path, tmp_path / "version")
    await client.update_weights_from_disk(str(version), 1)
    shutil.rmtree(version)
    async with await EngineClient.connect(chosen_engine.receiver) as another:
        assert another.capabilities == client.capabilities
