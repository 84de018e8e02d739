"""Pictures, sounds and videos through a real engine: what it samples beside what the trainer computes of the same samples."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.generation import GenerationRequest
from services.trainer.packing import pack
from services.trainer.parallel import runtime
from shared.data.media import ShownPictures
from shared.data.prompts import TrainingPrompts
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import BadMessage
from shared.schema.messages import Sampling
from shared.schema.sample import Sample, decode, encode
from tests.integration.engine.conftest import running_engine
from tests.support.run_config import run_config, write_jsonl
from tests.support.tiny_audio import wav, write_tiny_audio_model
from tests.support.tiny_vision import gif, png, write_tiny_vision_model
from tests.unit.trainer.megatron.rank_steps import actor

ROWS = [
    {"prompt": "what is <image> beside <image>?", "images": ["a.png", "b.jpg"]},
    {"prompt": "nothing to see", "images": []},
    {"prompt": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "and?"}]}]},
]


HEARD = [
    {"prompt": "what is <audio> beside <audio>?", "sounds": ["a.wav", "b.wav"]},
    {"prompt": "nothing to hear", "sounds": []},
    {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": "b.wav"}, {"type": "text", "text": "and?"}]}]},
]
FRAMES = [f"{number}.png" for number in range(5)]
WATCHED = [
    {"prompt": "what is <video> beside <video>?", "videos": ["a.gif", FRAMES]},
    {"prompt": "nothing to see", "videos": []},
    {"prompt": [{"role": "user", "content": [{"type": "video", "video": FRAMES}, {"type": "text", "text": "and?"}]}]},
]
ALL = {"image": (ROWS, "images"), "audio": (HEARD, "sounds"), "video": (WATCHED, "videos")}
MORE = [("qwen2_audio", "audio"), ("qwen2_5_vl", "video"), *((kind, "image") for kind in ("qwen2_5_vl", "qwen3_5", "glm4v"))]
REST = [pytest.param(*case, marks=pytest.mark.extra(each=True)) for case in MORE]


@pytest.mark.parametrize(("kind", "shows"), [("qwen3_vl", "image"), *REST])
def test_the_trainer_computes_what_the_engine_samples(kind, shows, tmp_path):
    if shows == "audio":
        write_tiny_audio_model(tmp_path / "model")
    else:
        write_tiny_vision_model(tmp_path / "model", kind)
    files = {"a.png": png(61, 40), "b.jpg": png(33, 90, kind="JPEG"), "a.wav": wav(0.7), "b.wav": wav(0.4, rate=22050, channels=2)}
    files |= {name: png(61, 40, seed=number) for number, name in enumerate(FRAMES)} | {"a.gif": gif(50, 70, [300, 500, 900, 100, 1000])}
    for name, encoded in files.items():
        (tmp_path / name).write_bytes(encoded)
    write_jsonl(tmp_path / "prompts.jsonl", ALL[shows][0])
    data = {"label_key": "", "apply_chat_template": True, "multimodal_keys": {shows: ALL[shows][1]}}
    config = run_config(tmp_path, data=data, trainer={"trainer_backend": "torch"}, reward={"custom_rm_path": "a:b"})
    prompts = TrainingPrompts(config, Tokenizer(tmp_path / "model"))
    rule = prompts._reader._pictures.rule
    sampling = Sampling(temperature=1.0, max_new_tokens=24)

    async def sampled(process):
        async with await EngineClient.connect(process.receiver) as client:
            await client.open_receivers()
            found = []
            for prompt in (prompts[index] for index in range(len(ROWS))):
                shown = ShownPictures(rule, prompt.pictures)
                requests = [GenerationRequest(prompt.tokens, 24, ignore_eos=True, shown=shown) for _ in range(2)]
                answers = await client.generate_group(requests, sampling)
                # continued, as after a push, and streamed
                longer = replace(requests[0], tokens=np.concatenate([prompt.tokens, answers[0].tokens]), rid="continued", max_new_tokens=8)
                more = [piece async for piece in client.generate_live(longer, sampling)]
                found.append((prompt, answers, (longer.tokens, np.concatenate([piece.tokens for piece in more]),
                                                np.concatenate([piece.log_probs for piece in more]))))  # fmt: skip
            wrong = GenerationRequest(np.delete(prompts[0].tokens, np.flatnonzero(prompts[0].tokens == rule.token)[1]), 4,
                                      shown=ShownPictures(rule, prompts[0].pictures))  # fmt: skip
            with pytest.raises(BadMessage, match="the engine reads"):
                await client.generate_group([wrong], sampling)
            return found

    with running_engine(tmp_path / "model", tmp_path, {"disable-radix-cache": False}) as process:
        found = asyncio.run(sampled(process))
    samples = []
    for number, (prompt, answers, (before, tokens, log_probs)) in enumerate(found):
        generated = [(prompt.tokens, answer.tokens, answer.log_probs) for answer in answers] + [(before, tokens, log_probs)]
        for index, (asked, response, probabilities) in enumerate(generated):
            assert not np.isin(response, rule.forbidden).any()
            span, mask = [(0, len(response), 0)], np.ones(len(response), np.uint8)
            samples.append(Sample(f"g{number}", index, asked, response, probabilities, mask, span, "length", "", pictures=prompt.pictures))
    blobs = encode(samples, 1000)
    assert sum(blob.count(samples[0].pictures[0]) for blob in blobs) == 1  # all samples of it share one copy
    samples = decode(blobs)
    model = actor(tmp_path / "model", trainer_backend="torch", shows=shows)
    try:
        batch = pack(samples, [1.0] * len(samples))
        (log_probs,) = model.log_probs([batch])
    finally:
        runtime.stop()
    trained = batch.loss_mask > 0
    difference = (log_probs - batch.fields["rollout_log_probs"])[trained].abs().max()
    assert int(trained.sum()) == sum(len(sample.response) for sample in samples) and difference < 1e-4
    torch.testing.assert_close(log_probs[trained].isfinite().all(), torch.tensor(True))
