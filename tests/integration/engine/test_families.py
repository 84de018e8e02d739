"""An engine that is pushed what the trainer exports draws the same greedy tokens, for every family that SGLang serves on a CPU."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import Generation, GenerationRequest
from services.trainer.parallel import runtime
from shared.schema.messages import Sampling
from tests.integration.engine.conftest import running_engine
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.support.weights_group import Pusher
from tests.unit.trainer.megatron import rank_steps
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint, pack, sequences

SERVED = (
    "deepseek_v3",
    "gemma3_text",
    "deepseek_v32",
    "glm_moe_dsa",
    "moonlight",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_oss",
    "llama",
    "mistral",
    "minimax_m2",
    "qwen2",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
)
"""One start of an engine each; the rest of this directory has ``qwen3``."""

NEW_TOKENS = 24

_PIXELS = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
PROCESSORS: dict[str, dict[str, Any]] = {
    "preprocessor_config.json": {"image_processor_type": "Qwen2VLImageProcessor", **_PIXELS},
    "video_preprocessor_config.json": {"video_processor_type": "Qwen3VLVideoProcessor", **_PIXELS},
}
"""What an engine of a model that sees wants beside it."""


async def generated(engine: EngineProcess, old: Path, new: Path, prompts: list[torch.Tensor]) -> list[Generation]:
    """What the engine answers once it has been pushed the ``new`` weights, after the ``old`` ones: as it learned to load those."""
    requests = [GenerationRequest(prompt.int().numpy(), NEW_TOKENS, ignore_eos=True) for prompt in prompts]
    async with await EngineClient.connect(engine.receiver) as client:
        assert engine.receiver is not None  # it was started
        await client.open_receivers()
        async with Pusher.over(client) as pusher:
            for version, weights in enumerate((old, new), start=1):
                files = [path for path in weights.glob("*.safetensors") if "vision" not in path.name]
                tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
                await pusher.push({name: tensors[name].float() for name in sorted(tensors)}, version)
            (checked,) = await pusher.send(pusher.sent, 2, check=True)
            assert checked.differences == {} and checked.digest == pusher.digest
        return await client.generate_group(requests, Sampling(temperature=0.0, max_new_tokens=1))


@pytest.mark.extra(each=True)
@pytest.mark.parametrize("kind", SERVED)
def test_greedy_tokens_are_the_trainers(kind: str, tmp_path: Path) -> None:
    make_checkpoint(kind, tmp_path / "made")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    if "index_topk" in config:  # on a CPU contexts are no longer: every key is attended to, here and there
        (tmp_path / "made" / "config.json").write_text(json.dumps({**config, "index_topk": 512}))
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(tmp_path / "made")
    for name, content in PROCESSORS.items() if kind.startswith("qwen3_5") else ():
        (tmp_path / "made" / name).write_text(json.dumps(content))
    try:
        actor = rank_steps.actor(tmp_path / "made")
        rank_steps.steps(actor, 1)  # what the engine is given is not what it started with
        actor.save_hf(tmp_path / "exported")
        prompts = sequences(3, seed=5, longest=20)
        with running_engine(tmp_path / "made", tmp_path, {}) as engine:
            answers = asyncio.run(generated(engine, tmp_path / "made", tmp_path / "exported", prompts))
        whole = [torch.cat([prompt, torch.tensor(one.tokens).long()]) for prompt, one in zip(prompts, answers, strict=True)]
        logits = rank_steps.logits(actor, pack(whole)).split([len(one) for one in whole])
        for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
            predicted = rows[len(prompt) - 1 : -1]
            assert predicted.argmax(-1).tolist() == answer.tokens.tolist()
    finally:
        runtime.stop()
