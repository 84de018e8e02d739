"""A checkpoint with quantized weights: engines serve it as it is, and get every version quantized as it is."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import Generation, GenerationRequest
from services.trainer.actor import Actor
from services.trainer.weights.snapshot_writer import WeightCheckpointWriter, on_host
from services.trainer.weights.stage_sender import StageSender
from shared.model.quantization import quantization_of
from shared.transfer.digest import version_digest
from shared.transfer.quantizer import plain, quantized
from shared.transfer.weight_checkpoint import LocalCheckpoint, WeightCheckpoints
from tests.integration.engine.conftest import running_engine
from tests.integration.engine.load import SAMPLING
from tests.support.converting import quantized_checkpoint
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.support.weights_group import JOIN_SECONDS
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, pack

SECONDS = 60.0
IN_BLOCKS = ["fp8-block", "--block", "8", "8"]
PROMPT = np.arange(12, dtype=np.int32)


@pytest.mark.extra
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("qwen3_moe", IN_BLOCKS),
        pytest.param("qwen3", [*IN_BLOCKS, "--scale-fmt", "ue8m0"], marks=pytest.mark.extra),
        pytest.param("deepseek_v3", IN_BLOCKS, marks=pytest.mark.extra),
        pytest.param("qwen3_moe", ["int4"], marks=pytest.mark.extra),
        pytest.param("qwen3", ["int4", "--layout", "awq"], marks=pytest.mark.extra),
        pytest.param("qwen3_moe", ["int4", "--experts-only"], marks=pytest.mark.extra),
    ],
)
def test_an_engine_computes_with_what_was_quantized(kind: str, how: list[str], tmp_path: Path) -> None:
    """By pushes, twice, and from disk: its log-probs are those of a trainer whose matrices are rounded the same way: by the test,
    or with 4-bit integers by the trainer itself."""
    sizes = {} if "--block" in how else {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    make_checkpoint(kind, tmp_path / "whole", **sizes)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(tmp_path / "whole")
    model = quantized_checkpoint(tmp_path / "whole", tmp_path / "model", *how)
    quantization = quantization_of(model)
    assert quantization is not None and len(quantization.names) >= 14
    actor = rank_steps.actor(model, lr=3e-2, quantization_aware="int4" in how)
    sender = StageSender(actor.model, "group", SECONDS, 8192, quantization=actor.quantization)
    try:
        with running_engine(model, tmp_path, {"dtype": "float32"}) as engine:
            asyncio.run(compare(engine, actor, sender, tmp_path))
        actor.save_hf(tmp_path / "out")
        whole = load_file(tmp_path / "whole" / "model.safetensors")
        assert load_file(tmp_path / "out" / "model.safetensors").keys() == whole.keys()
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    finally:
        sender.close()
        rank_steps.runtime.stop()


async def compare(engine: EngineProcess, actor: Actor, sender: StageSender, directory: Path) -> None:
    async with await EngineClient.connect(engine.receiver) as client:
        await client.open_receivers()
        channels = await asyncio.to_thread(sender.open, 1, {"": 1})
        await client.join_channels(channels, 1, timeout=JOIN_SECONDS)
        await asyncio.to_thread(sender.join, JOIN_SECONDS)
        for version in (1, 2):
            rank_steps.steps(actor, 2, first=2 * version)
            for check in (False, True):
                await client.pause("in_place")
                await client.begin_weight_update()
                number, names = 2 * version + check, [channel.name for channel in channels]
                received, sent = await asyncio.gather(
                    client.receive(version, number, names, check=check, deadline=SECONDS),
                    asyncio.to_thread(sender.send, number, partial=False, seconds=SECONDS),
                )
                await client.end_weight_update()
                await client.set_weight_version(version)
                await client.resume()
                assert sent.error is None and received.digest == version_digest(sent.known)
                assert received.differences == {}
            assert_alike(actor, await drawn(client))
        await client.leave_channels()
        rank_steps.steps(actor, 2, first=8)
        checkpoints = WeightCheckpoints(directory / "weights")
        draft = WeightCheckpointWriter(checkpoints, 3)
        for bucket in actor.export(8192):
            draft.add(on_host(bucket, actor.quantization))
        written = draft.publish()
        link = LocalCheckpoint(directory / "copy").follow(checkpoints, 3)
        (link.path / "config.json").write_text((directory / "model" / "config.json").read_text())
        await client.update_weights_from_disk(str(link.path), 3)
        assert await client.adopt(3, link.tensors) == written.digest
        assert_alike(actor, await drawn(client))


async def drawn(client: EngineClient) -> Generation:
    (generation,) = await client.generate_group([GenerationRequest(PROMPT, 24, ignore_eos=True)], SAMPLING)
    return generation


def assert_alike(actor: Actor, generation: Generation) -> None:
    tokens = torch.from_numpy(np.concatenate([PROMPT, generation.tokens]).astype(np.int64))

    def apart() -> float:
        trainers = actor.log_probs([pack([tokens])])[0][len(PROMPT) - 1 : -1].numpy()
        return float(np.abs(trainers - generation.log_probs).max())

    if actor.settings.trainer.rounded_by:
        assert apart() < 1e-4
        return
    assert apart() > 1e-3, "the engine computes as if nothing had been rounded"
    before = [parameter.clone() for module in actor.model.modules for parameter in module.parameters()]
    with torch.no_grad():
        round_matrices(actor)
        rounded = apart()
        for parameter, old in zip((one for module in actor.model.modules for one in module.parameters()), before, strict=True):
            parameter.copy_(old)
    assert rounded < 1e-4


def round_matrices(actor: Actor) -> None:
    """Lays the numbers that the engine has in the places of the trainer's own."""
    quantization = actor.quantization
    assert quantization is not None
    plan = actor._gather_plan
    for unit in plan.units:
        parts = plan.parts(unit)
        assert parts is not None
        for (name, shape), part in zip(unit.tensors, parts, strict=True):
            if name in quantization.names:
                made = plain(quantized(part.reshape(shape), quantization.format), quantization.format, part.dtype)
                part.copy_(made.view(part.shape))
