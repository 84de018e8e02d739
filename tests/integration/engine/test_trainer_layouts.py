"""What the trainer's ranks export, split over them in any way, leaves the engine with the trainer's own log-probs, by every transport."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import Generation, GenerationRequest
from services.trainer.actor import Actor
from services.trainer.parallel.export import copy_beside_weights
from services.trainer.weights.snapshot_writer import WeightCheckpointWriter, on_host
from services.trainer.weights.stage_sender import ChannelKind, StageSender
from shared.schema.messages import Sampling
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer.digest import TensorDigest, decoded_digests, version_digest
from shared.transfer.weight_checkpoint import LocalCheckpoint, WeightCheckpoint, WeightCheckpoints
from tests.integration.engine.conftest import Checkpoints, running_engine
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.support.waiting import wait_until
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, pack, sequences
from tests.unit.trainer.megatron.world import World

EXACT = 1e-4
SECONDS = 120.0
NEW_TOKENS = 24
BUCKET_BYTES = 16_384
PUSHES, WHOLE, DELTA = 2, 3, 4  # as many versions are pushed; those of the snapshots

Then = Literal["disk", "peer"]
LAYOUTS = [
    ("qwen3", {"tensor_model_parallel_size": 2}, "group", "disk"),
    pytest.param("qwen3", {"pipeline_model_parallel_size": 2}, "group", "disk", marks=pytest.mark.extra),
    pytest.param("qwen3", {"tensor_model_parallel_size": 2}, "memory", "disk", marks=pytest.mark.extra),
    pytest.param("qwen3_moe", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "group", "disk", marks=pytest.mark.extra),
    pytest.param("qwen3_moe", {"pipeline_model_parallel_size": 2}, "group", "disk", marks=pytest.mark.extra),
    pytest.param("qwen3_moe", {"pipeline_model_parallel_size": 2}, "memory", "disk", marks=pytest.mark.extra),
    pytest.param("qwen3_moe", {"expert_model_parallel_size": 2}, "memory", "disk", marks=pytest.mark.extra),
    pytest.param("qwen3_moe", {"expert_model_parallel_size": 2}, "group", "peer", marks=pytest.mark.extra),
]
"""Model, layout, what carries the pushes, and where the engine that is looked at next has the version after them from."""

Engines = Callable[..., EngineProcess]


@pytest.fixture(scope="module")
def checkpoints(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    moe = tmp_path_factory.mktemp("checkpoints")
    make_checkpoint("qwen3_moe", moe)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(moe)
    return {"qwen3": checkpoint(0).path, "qwen3_moe": moe}


@pytest.fixture(scope="module")
def engines(engine: EngineProcess, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """``engines(kind, number)``: one of those that serve the checkpoint of that kind, started when it is first asked for."""
    running = {("qwen3", 0): engine}
    with ExitStack() as stack:

        def started(kind: str, number: int = 0) -> EngineProcess:
            if (kind, number) not in running:
                process = stack.enter_context(running_engine(checkpoints[kind], tmp_path_factory.mktemp(kind), {}))
                running[kind, number] = process
            return running[kind, number]

        yield started


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.stop()


@pytest.mark.parametrize(("kind", "layout", "carried_by", "then"), LAYOUTS)
async def test_log_probs_are_the_trainers(
    kind: str,
    layout: dict[str, Any],
    carried_by: ChannelKind,
    then: Then,
    checkpoints: dict[str, Path],
    engines: Engines,
    ranks: World,
    tmp_path: Path,
) -> None:
    async with connected(await asyncio.to_thread(engines, kind), checkpoints[kind]) as client:
        trainer = asyncio.create_task(asyncio.to_thread(ranks.run, trained, checkpoints[kind], layout, carried_by, tmp_path))
        channels = [WeightChannelAddress.model_validate(channel) for channel in await said(tmp_path, "channels", trainer)]
        assert [channel.kind for channel in channels] == [carried_by] * layout.get("pipeline_model_parallel_size", 1)
        await client.join_channels(channels, 1)
        for push in range(PUSHES):  # by load_weights, and as it learned from that
            await client.begin_weight_update()
            got = await client.receive(push, push, [channel.name for channel in channels])
            await client.end_weight_update()
            await client.set_weight_version(push)
        await client.leave_channels()
        pushed = await draw(client, tmp_path, "pushed")

        digest = await said(tmp_path, "written", trainer)
        link = LocalCheckpoint(tmp_path / "copy").follow(WeightCheckpoints(tmp_path / "weights"), DELTA)
        await client.update_weights_from_disk(str(link.path), DELTA)
        assert await client.adopt(DELTA, link.tensors) == digest["snapshot"]
        if then == "peer":
            async with connected(await asyncio.to_thread(engines, kind, 1), checkpoints[kind]) as joiner:
                assert await transferred(joiner, client) == digest["snapshot"]
                loaded = await draw(joiner, tmp_path, "loaded")
        else:
            loaded = await draw(client, tmp_path, "loaded")
        scores = (await trainer)[0]
    assert got.digest == digest["push"] != digest["snapshot"]
    for answers, scored in zip((pushed, loaded), scores, strict=True):
        for prompt, answer, whole in zip(prompts(), answers, scored, strict=True):
            assert np.abs(answer.log_probs - whole[len(prompt) - 1 : -1]).max() < EXACT


# ------------------------------------------------------------------------------------------------------- the engines


@asynccontextmanager
async def connected(engine: EngineProcess, model: Path) -> AsyncIterator[EngineClient]:
    async with await EngineClient.connect(engine.receiver) as client:
        await client.open_receivers()
        await client.update_weights_from_disk(str(model), 0)
        yield client


async def draw(client: EngineClient, place: Path, what: str) -> list[Generation]:
    """Generations that the trainer is to score."""
    requests = [GenerationRequest(prompt.int().numpy(), NEW_TOKENS, ignore_eos=True) for prompt in prompts()]
    answers = await client.generate_group(requests, Sampling(temperature=1.0, max_new_tokens=1))
    say(place, what, [answer.tokens.tolist() for answer in answers])
    return answers


async def transferred(joiner: EngineClient, source: EngineClient) -> str:
    """Returns the digest of what the joiner has taken from the source."""
    order = {"verb": "send_to_peer", "version": DELTA, "name": "transfer-0-1-1", "address": "127.0.0.1", "ranks": 1, "seconds": SECONDS}
    channels = [answer["channel"] for answer in await source.receivers.ask(order, SECONDS)]
    await joiner.join_channels([WeightChannelAddress.model_validate(channel) for channel in channels], 1, timeout=SECONDS)
    received = await joiner.receive(DELTA, DELTA, ["transfer-0-1-1"], deadline=SECONDS)
    await joiner.leave_channels()
    await joiner.set_weight_version(DELTA)
    return received.digest


def prompts() -> list[torch.Tensor]:
    return sequences(3, seed=5, longest=20)


# --------------------------------------------------------------------------------------------------------- the ranks


def trained(hf_dir: Path, layout: dict[str, Any], carried_by: ChannelKind, place: Path) -> list[list[np.ndarray]]:
    """One rank: scores of what was drawn with the weights of one step, which it pushes, and of the next, which it writes to disk."""
    actor = rank_steps.actor(hf_dir, **layout)
    rank_steps.steps(actor, 1)
    push = pushed_digest(actor, carried_by, place)
    scores = [scored(actor, place / "pushed.json")]
    snapshots = WeightCheckpoints(place / "weights")
    whole = write_snapshot(actor, snapshots, WHOLE, None)
    rank_steps.steps(actor, 1, first=1)
    base = LocalCheckpoint(place / "base")
    if whole is not None:
        base.copy_from(whole)
    link = write_snapshot(actor, snapshots, DELTA, base)
    if link is not None:
        assert link.kind == "delta"
        say(place, "written", {"push": push, "snapshot": link.digest})
    return [*scores, scored(actor, place / "loaded.json")]


def pushed_digest(actor: Actor, carried_by: ChannelKind, place: Path) -> str:
    """Pushes to one engine, and tells of what."""
    sender = StageSender(actor.model, carried_by, SECONDS, bucket_bytes=BUCKET_BYTES)
    channels = sender.open(0, {"": 1})
    if dist.get_rank() == 0:
        say(place, "channels", [channel.model_dump() for channel in channels])
    sender.join(SECONDS)
    known: dict[str, TensorDigest] = {}
    for push in range(PUSHES):
        sent = sender.send(push, partial=False, seconds=SECONDS)
        assert sent.error is None, sent.error
        for tensors in sender.agree(sent.known):
            known |= decoded_digests(tensors)
    sender.agree(wait_for(place / "pushed.json"))  # the engine has everything
    sender.close()
    return version_digest(known)


def write_snapshot(actor: Actor, snapshots: WeightCheckpoints, version: int, base: LocalCheckpoint | None) -> WeightCheckpoint | None:
    """Rank 0's; None on the others."""
    draft = WeightCheckpointWriter(snapshots, version, base) if dist.get_rank() == 0 else None
    for bucket in actor.export(BUCKET_BYTES):
        if draft is not None:
            draft.add(on_host(bucket))
    return None if draft is None else draft.publish(lambda directory: copy_beside_weights(actor.hf_dir, directory))


def scored(actor: Actor, drawn: Path) -> list[np.ndarray]:
    whole = [torch.cat([prompt, torch.tensor(tokens)]) for prompt, tokens in zip(prompts(), wait_for(drawn), strict=True)]
    (scores,) = actor.log_probs([pack(whole)])
    return [part.numpy() for part in scores[: sum(map(len, whole))].split([len(one) for one in whole])]


# ------------------------------------------------------------------------------------- what one side says to the other


def say(place: Path, what: str, value: Any) -> None:
    (place / f"{what}.part").write_text(json.dumps(value))
    (place / f"{what}.part").rename(place / f"{what}.json")


def wait_for(path: Path) -> Any:
    wait_until(path.exists, path.name, SECONDS)
    return json.loads(path.read_text())


async def said(place: Path, what: str, by: asyncio.Task[Any]) -> Any:
    """What the ranks have written, unless they have failed first."""
    reading = asyncio.create_task(asyncio.to_thread(wait_for, place / f"{what}.json"))
    done, _ = await asyncio.wait({reading, by}, return_when=asyncio.FIRST_COMPLETED)
    if by in done:
        await by
    return await reading
