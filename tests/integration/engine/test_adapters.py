"""A trainer's adapters in a real engine: nothing else travels, and both ends compute the same."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import GenerationRequest
from services.trainer.actor import Actor
from services.trainer.weights.stage_sender import SentPush, StageSender
from shared.schema.weight_messages import WeightsReceived
from shared.transfer.digest import version_digest
from tests.integration.engine.conftest import Checkpoints, running_engine
from tests.integration.engine.load import SAMPLING, prompts
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.support.weights_group import JOIN_SECONDS
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, pack

SECONDS = 60.0


@pytest.fixture
def adapted(checkpoint: Checkpoints) -> Iterator[Actor]:
    """A trainer of one rank, with adapters on what the engine serves."""
    yield rank_steps.actor(checkpoint(0).path, lora_rank=4, lr=1e-2)
    rank_steps.runtime.stop()


@pytest.mark.extra
def test_adapters_of_experts_are_laid_over_the_engines_own_checkpoint(tmp_path: Path) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(tmp_path)
    actor = rank_steps.actor(tmp_path, lora_rank=4, lr=1e-2, target_modules=("gate_proj", "up_proj", "down_proj"))
    sender = StageSender(actor.model, "group", SECONDS, 8192)
    prompt = np.arange(12, dtype=np.int32)
    whole = torch.from_numpy(prompt.astype(np.int64))

    async def pushed(engine: EngineProcess) -> tuple[np.ndarray, WeightsReceived]:
        """Returns log-probs of what the engine has generated after a push, less the trainer's, and what a push of the same found."""
        async with await EngineClient.connect(engine.receiver) as client:
            await client.open_receivers()
            channels = await asyncio.to_thread(sender.open, 2, {"": 1})
            await client.join_channels(channels, 1, timeout=JOIN_SECONDS)
            await asyncio.to_thread(sender.join, JOIN_SECONDS)
            found = []
            for number, check in ((1, False), (2, True)):
                await client.pause("in_place")
                await client.begin_weight_update()
                received, sent = await asyncio.gather(
                    client.receive(1, number, [channel.name for channel in channels], check=check, deadline=SECONDS),
                    asyncio.to_thread(sender.send, number, partial=False, seconds=SECONDS),
                )
                await client.end_weight_update()
                await client.set_weight_version(1)
                await client.resume()
                assert sent.error is None and received.digest == version_digest(sent.known)
                found.append(received)
            (generation,) = await client.generate_group([GenerationRequest(prompt, 24, ignore_eos=True)], SAMPLING)
            await client.leave_channels()
            tokens = torch.cat([whole, torch.from_numpy(generation.tokens.astype(np.int64))])
            trainers = actor.log_probs([pack([tokens])])[0][len(prompt) - 1 : -1].numpy()
            return trainers - generation.log_probs, found[1]

    try:
        rank_steps.steps(actor, 8)
        with running_engine(tmp_path, tmp_path, {"dtype": "float32"}) as engine:
            apart, again = asyncio.run(pushed(engine))
        assert again.differences == {}
        assert np.abs(apart).max() < 1e-4
        changed = actor.log_probs([pack([whole])])[0][:-1]
        actor.model.silence_adapters()
        assert (actor.log_probs([pack([whole])])[0][:-1] - changed).abs().mean() > 0.1, "the engine would have been near without them, too"
    finally:
        sender.close()
        rank_steps.runtime.stop()


async def test_adapters_alone_make_the_engine_compute_what_the_trainer_does(
    client: EngineClient, adapted: Actor, checkpoint: Checkpoints
) -> None:
    sender = StageSender(adapted.model, "group", SECONDS, 8192)
    channels = await asyncio.to_thread(sender.open, 2, {"": 1})
    await client.join_channels(channels, 1, timeout=JOIN_SECONDS)
    await asyncio.to_thread(sender.join, JOIN_SECONDS)

    def send(number: int) -> SentPush:
        return sender.send(number, partial=False, seconds=SECONDS)

    async def push(number: int, version: int, check: bool = False) -> WeightsReceived:
        """Returns what the engine says, once it is what the trainer has sent."""
        await client.pause("in_place")
        await client.begin_weight_update()
        names = [channel.name for channel in channels]
        received, sent = await asyncio.gather(
            client.receive(version, number, names, check=check, deadline=SECONDS), asyncio.to_thread(send, number)
        )
        await client.end_weight_update()
        await client.set_weight_version(version)
        await client.resume()
        assert sent.error is None and received.digest == version_digest(sent.known) and received.bytes == sent.bytes
        assert set(sent.known) == {unit.name for unit in sender.plan.of_stage()}
        return received

    try:
        for number, version in ((2, 1), (4, 2)):
            rank_steps.steps(adapted, 2, first=number)
            received = await push(number, version)
            assert received.bytes < sum(tensor.nbytes for tensor in checkpoint(0).model.parameters()) / 2
            assert (await push(number + 1, version, check=True)).differences == {}
            prompt = prompts(1)[0]
            (generation,) = await client.generate_group([GenerationRequest(prompt, 24, ignore_eos=True)], SAMPLING)
            assert [span.version for span in generation.spans] == [version]
            whole = torch.from_numpy(np.concatenate([prompt, generation.tokens]).astype(np.int64))
            trainers = adapted.log_probs([pack([whole])])[0][len(prompt) - 1 : -1].numpy()
            assert np.abs(trainers - generation.log_probs).max() < 1e-4
            base = torch.log_softmax(checkpoint(0).model(whole[None]).logits[0], -1)[:-1].gather(1, whole[1:, None])
            assert np.abs(base[len(prompt) - 1 :, 0].detach().numpy() - generation.log_probs).max() > 1e-2
        rank_steps.steps(adapted, 1, first=6)
        differing = (await push(7, 2, check=True)).differences
        assert set(differing) == {name for name in rank_steps.exported(adapted) if "_proj." in name}
    finally:
        await client.leave_channels()
        sender.close()
