"""What the trainer's ranks push, split over them in any way, leaves the engine with the trainer's own log-probs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.rollout.engine.client import EngineClient
from services.rollout.engine.generation import Generation, GenerationRequest
from services.rollout.engine.process import EngineProcess
from services.trainer.weights.sender import LaneKind, Sender
from shared.messages import Sampling, WeightsLane
from shared.weights.digest import Known, version_digest
from tests.integration.engine.conftest import running_engine
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, pack, sequences
from tests.unit.trainer.megatron.world import World

EXACT = 1e-4
SECONDS = 120.0
NEW_TOKENS = 24
PUSHES = 2
KINDS = ["qwen3", "qwen3_moe"]
LAYOUTS: list[tuple[str, dict[str, Any], LaneKind]] = [
    ("qwen3", {"tensor_model_parallel_size": 2}, "group"),
    ("qwen3", {"pipeline_model_parallel_size": 2}, "group"),
    ("qwen3", {"tensor_model_parallel_size": 2}, "memory"),
    ("qwen3_moe", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, "group"),
    ("qwen3_moe", {"pipeline_model_parallel_size": 2}, "group"),
    ("qwen3_moe", {"pipeline_model_parallel_size": 2}, "memory"),
    ("qwen3_moe", {"expert_model_parallel_size": 2}, "group"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    for kind in KINDS:
        make_checkpoint(kind, root / kind)
        character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(root / kind)
    return lambda kind: root / kind


@pytest.fixture(scope="module")
def engines(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], EngineProcess]]:
    """``engines(kind)``: one that serves the checkpoint of that kind, started when it is first asked for."""
    running: dict[str, Any] = {}

    def engine(kind: str) -> EngineProcess:
        if kind not in running:
            running[kind] = running_engine(checkpoints(kind), tmp_path_factory.mktemp(kind), {})
            running[kind, "process"] = running[kind].__enter__()
        process: EngineProcess = running[kind, "process"]
        return process

    yield engine
    for kind in KINDS:
        if kind in running:
            running[kind].__exit__(None, None, None)


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    world = World(2)
    yield world
    world.stop()


@pytest.mark.parametrize(("kind", "layout", "carried_by"), LAYOUTS)
async def test_log_probs_are_the_trainers(
    kind: str,
    layout: dict[str, Any],
    carried_by: LaneKind,
    checkpoints: Callable[[str], Path],
    engines: Callable[[str], EngineProcess],
    ranks: World,
    tmp_path: Path,
) -> None:
    engine = await asyncio.to_thread(engines, kind)
    prompts = sequences(3, seed=5, longest=20)
    async with await EngineClient.connect(engine.url) as client:
        assert engine.receiver is not None  # it was started
        await client.open_receiver(engine.receiver)
        trainer = asyncio.create_task(asyncio.to_thread(ranks.run, push_and_score, checkpoints(kind), layout, carried_by, tmp_path))
        lanes = [WeightsLane.model_validate(lane) for lane in await said(tmp_path, "lanes", trainer)]
        assert [lane.kind for lane in lanes] == [carried_by] * layout.get("pipeline_model_parallel_size", 1)
        await client.join_lanes(lanes, 1)
        for push in range(PUSHES):  # by load_weights, and as it learned from that
            await client.begin_weight_update()
            got = await client.receive(push, push, [lane.name for lane in lanes])
            await client.end_weight_update()
            await client.set_weight_version(push)
        requests = [GenerationRequest(prompt.int().numpy(), NEW_TOKENS, ignore_eos=True) for prompt in prompts]
        answers: list[Generation] = await client.generate_group(requests, Sampling(temperature=1.0, max_new_tokens=1))
        say(tmp_path, "drawn", [answer.tokens.tolist() for answer in answers])
        digest, scores = (await trainer)[0]
    assert got.digest == digest
    for prompt, answer, scored in zip(prompts, answers, scores, strict=True):
        assert np.abs(answer.log_probs - scored[len(prompt) - 1 : -1]).max() < EXACT


def push_and_score(hf_dir: Path, layout: dict[str, Any], carried_by: LaneKind, place: Path) -> tuple[str, list[np.ndarray]]:
    """One rank: pushes the weights of one training step, then scores what the engine has drawn with them."""
    actor = rank_steps.actor(hf_dir, **layout)
    rank_steps.steps(actor, 1)
    sender = Sender(actor.model, carried_by, SECONDS, bucket_bytes=16_384)
    lanes = sender.open(0, engine_ranks=1)
    if torch.distributed.get_rank() == 0:
        say(place, "lanes", [lane.model_dump() for lane in lanes])
    sender.join(SECONDS)
    known: dict[str, Known] = {}
    for push in range(PUSHES):
        sent = sender.finish(sender.stream(push, partial=False, seconds=SECONDS))
        assert sent.error is None, sent.error
        for tensors in sender.agree({name: [one.dtype, one.shape, one.digest] for name, one in sent.known.items()}):
            known |= {name: Known(dtype, tuple(shape), digest) for name, (dtype, shape, digest) in tensors.items()}
    drawn = wait_for(place / "drawn.json")
    whole = [torch.cat([prompt, torch.tensor(tokens)]) for prompt, tokens in zip(sequences(3, seed=5, longest=20), drawn, strict=True)]
    (scores,) = actor.log_probs([pack(whole)])
    sender.close()
    return version_digest(known), [part.numpy() for part in scores[: sum(map(len, whole))].split([len(one) for one in whole])]


def say(place: Path, what: str, value: Any) -> None:
    (place / f"{what}.part").write_text(json.dumps(value))
    (place / f"{what}.part").rename(place / f"{what}.json")


def wait_for(path: Path) -> Any:
    end = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name} within {SECONDS:g} s"
        time.sleep(0.01)
    return json.loads(path.read_text())


async def said(place: Path, what: str, by: asyncio.Task[Any]) -> Any:
    """What the ranks have written, unless they have failed first."""
    reading = asyncio.create_task(asyncio.to_thread(wait_for, place / f"{what}.json"))
    done, _ = await asyncio.wait({reading, by}, return_when=asyncio.FIRST_COMPLETED)
    if by in done:
        await by
    return await reading
