"""The experts that a real engine chose: they come for every token, also in pieces, and bring the trainer's log-probs to the engine's."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import GenerationRequest
from services.rollout.in_flight import Partial
from services.trainer.packing import pack
from services.trainer.parallel import runtime
from shared.model.families import read_architecture
from shared.schema.messages import Sampling
from shared.schema.sample import ExpertChoices, Sample
from tests.integration.engine.conftest import running_engine
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, sequences

NEW_TOKENS = 200
FLAGS = {"enable-return-routed-experts": True, "dtype": "bfloat16", "disable-radix-cache": False}


async def drawn(engine: EngineProcess, prompts: list[torch.Tensor], choices: ExpertChoices) -> tuple[list[Partial], list[Partial]]:
    """Samples drawn at once, and the first of them computed once more: its first half as a prompt, whose prefix is cached by then."""
    async with await EngineClient.connect(engine.receiver) as client:
        whole = [Partial(choices=choices) for _ in prompts]
        requests = [GenerationRequest(prompt.int().numpy(), NEW_TOKENS, ignore_eos=True, routed_from=0) for prompt in prompts]
        sampling = Sampling(temperature=1.0, max_new_tokens=NEW_TOKENS)
        for partial, generation in zip(whole, await client.generate_group(requests, sampling), strict=True):
            partial.extend(generation, NEW_TOKENS)
        pieces = []
        for prompt, one in zip(prompts[:2], whole[:2], strict=True):
            partial, half = Partial(choices=choices), one.tokens[: NEW_TOKENS // 2]
            first = np.concatenate([prompt.int().numpy(), half])
            for count in (1, NEW_TOKENS // 2):  # the second continues from where the first has told the experts
                request = GenerationRequest(first, count, ignore_eos=True, routed_from=partial.routed_from)
                [generation] = await client.generate_group([request], sampling)
                partial.extend(generation, NEW_TOKENS)
                first = np.concatenate([first, generation.tokens])
            pieces.append(partial)
        return whole, pieces


@pytest.mark.extra
def test_replayed_experts_bring_trainer_and_engine_together(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    make_checkpoint("qwen3_moe", tmp_path)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(tmp_path)
    choices = ExpertChoices.of(read_architecture(tmp_path))
    assert choices is not None and choices.layers == (0, 1)
    prompts = sequences(8, seed=5, longest=20)
    with running_engine(tmp_path, tmp_path, FLAGS) as engine:
        whole, pieces = asyncio.run(drawn(engine, prompts, choices))
    samples = []
    for index, (prompt, partial) in enumerate(zip(prompts, whole, strict=True)):
        assert not partial.unrouted and partial.routed is not None
        assert partial.routed.shape == (len(prompt) + NEW_TOKENS - 1, 2, 2)
        mask = np.ones(NEW_TOKENS, np.uint8)
        sample = Sample("g", index, prompt.int().numpy(), partial.tokens, partial.log_probs, mask, [(0, NEW_TOKENS, 0)], "length", "")
        sample.routed_experts = partial.routed
        assert choices.problem(sample.routed_experts, sample.length - 1) is None
        samples.append(sample)
    for prompt, one, partial in zip(prompts, whole, pieces, strict=False):
        assert partial.routed is not None and one.routed is not None
        known = len(prompt) + NEW_TOKENS // 2
        assert len(partial.routed) == known + 1 + NEW_TOKENS // 2 - 1
        same = (np.sort(partial.routed[:known], -1) == np.sort(one.routed[:known], -1)).all(-1).mean()
        assert same > 0.9  # one was computed token by token, the other at once: rounding differs
    differences = {}
    try:
        actor = rank_steps.actor(tmp_path)
        for name, given in (("own", None), ("replayed", choices)):
            packed = pack(samples, [1.0] * len(samples), given)
            [found] = actor.log_probs([packed])
            gap = (found - packed.fields["rollout_log_probs"]).abs()[packed.loss_mask > 0]
            differences[name] = (float(gap.mean()), float(gap.max()))
            record_property(f"log_prob_difference_{name}", differences[name])
    finally:
        runtime.stop()
    print(differences)
    assert differences["replayed"][0] < differences["own"][0]
    assert differences["replayed"][1] < differences["own"][1]
