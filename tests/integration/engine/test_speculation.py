"""An engine that speculates samples what it samples without, and its draft is pushed with the policy."""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.rollout.engine.generation import Generation, GenerationRequest
from services.rollout.engine.transport import InvalidRequest
from shared.config.speculation import DRAFT, OF_KIND
from shared.schema.messages import Sampling
from tests.integration.engine.conftest import Checkpoints, running_engine
from tests.support import two_samples
from tests.support.drafting_model import DraftingShape, of_policy, signs, write_drafting_model
from tests.support.tiny_model import PRINTABLE, TinyModelShape, character_tokenizer, write_tiny_model
from tests.support.weights_group import Pusher
from tests.unit.trainer.megatron.tiny import VOCAB, make_checkpoint

SHAPE, TEMPERATURE, NEW, GROUPS, GROUP = DraftingShape(), 0.8, 6, 8, 128
PROMPT = np.arange(5, 15, dtype=np.int32)
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
LARGEST = 3.5
"""Standard deviations that a sum of squares may lie above its mean: the seeds are fixed, and one run of several thousand would."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("drafting")
    return path, write_drafting_model(path, SHAPE)


@pytest.fixture(scope="module")
def drafting(model: tuple[Path, dict[str, torch.Tensor]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose draft is a layer of the model's."""
    with running_engine(model[0], tmp_path_factory.mktemp("mtp"), dict(OF_KIND["mtp"])) as engine:
        yield engine


@pytest.fixture
def undrafted(model: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> Iterator[EngineProcess]:
    """One that does not speculate."""
    with running_engine(model[0], tmp_path, {}) as engine:
        yield engine


def deviations(one: list[Generation], other: list[Generation]) -> float:
    """Returns the distance of two runs; in float32 on a CPU that of one way from itself is the one of independent samples."""
    return two_samples.deviations([found.tokens.tolist() for found in one], [found.tokens.tolist() for found in other], NEW)


async def sampled(client: EngineClient, new: int = NEW) -> list[Generation]:
    found = []
    for _ in range(GROUPS):
        requests = [GenerationRequest(PROMPT, new, ignore_eos=True) for _ in range(GROUP)]
        found += await client.generate_group(requests, Sampling(temperature=TEMPERATURE, max_new_tokens=new))
    return found


async def accept_length(client: EngineClient) -> float:
    """Returns how many tokens a verification brought, on average."""
    requests = [GenerationRequest(PROMPT, 64, ignore_eos=True) for _ in range(32)]
    found = await client.generate_group(requests, Sampling(temperature=TEMPERATURE, max_new_tokens=64))
    return sum(len(one.tokens) for one in found) / sum(one.verifications for one in found)


async def scored(client: EngineClient, tokens: np.ndarray) -> list[float]:
    """Returns the log-probs at temperature 1 that a prefill, which nobody speculates in, computes."""
    body = {"input_ids": tokens.tolist(), "sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    answer = await client.transport.post("/generate", body, 60, "")
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][len(PROMPT) :]]


@pytest.mark.extra
async def test_tokens_are_those_of_plain_decoding(undrafted: EngineProcess, drafting: EngineProcess) -> None:
    runs = []
    for engine in (undrafted, drafting):
        async with await EngineClient.connect(engine.receiver) as client:
            await client.open_receivers()
            runs.append(await sampled(client))
            assert client.capabilities.speculates == (engine is drafting) == bool(client.accepted.counts)
            greedy = await client.generate_group(
                [GenerationRequest(PROMPT, 24, ignore_eos=True)], Sampling(temperature=0, max_new_tokens=24)
            )
            runs[-1].append(greedy[0])
            one = (await client.generate_group([GenerationRequest(PROMPT, 24)], Sampling(temperature=1, max_new_tokens=24)))[0]
            assert np.allclose(one.log_probs, await scored(client, np.concatenate([PROMPT, one.tokens])), atol=1e-4)
    plain, drafted = runs
    assert plain.pop().tokens.tolist() == drafted.pop().tokens.tolist()
    assert abs(deviations(plain, drafted)) < LARGEST
    likeliest = [found for found in plain if found.tokens[1] == Counter(one.tokens[1] for one in plain).most_common(1)[0][0]]
    assert deviations(plain, likeliest) > 10 * LARGEST  # the test would see what a verifier that takes the likeliest token does
    assert sum(len(found.tokens) for found in drafted) / sum(found.verifications for found in drafted) > 1.3  # drafts were accepted


@pytest.mark.extra
async def test_what_verification_leaves_out_is_refused(drafting: EngineProcess) -> None:
    async with await EngineClient.connect(drafting.receiver) as client:
        for changed in ({"repetition_penalty": 1.1}, {"min_new_tokens": 3}):
            with pytest.raises(InvalidRequest, match=f"{next(iter(changed))} = .*: none where the engine speculates"):
                await client.generate_group([GenerationRequest(PROMPT, 4)], Sampling(temperature=1.0, max_new_tokens=4, **changed))


@pytest.mark.extra
async def test_a_draft_is_pushed_with_its_policy(drafting: EngineProcess, model: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, tensors = model
    old, new = signs(SHAPE, 0.0), signs(SHAPE, 0.4)
    async with await EngineClient.connect(drafting.receiver) as client:
        await client.open_receivers()
        known = await accept_length(client)
        async with Pusher.over(client) as pusher:
            await pusher.push(of_policy(tensors, new, None), 1)
            stale = await accept_length(client)  # a trainer that does not train the draft pushes none: it stays as it was
            await pusher.push(of_policy(tensors, new, new), 2)
            learned = await accept_length(client)
            (checked,) = await pusher.send(pusher.sent, 2, check=True)
            assert checked.differences == {} and checked.digest == pusher.digest
            await pusher.push(of_policy(tensors, old, new), 3)  # by the traced copies, as all pushes but the first of their kind
            behind = await accept_length(client)
        await client.update_weights_from_disk(str(path), 4)
        again = await accept_length(client)
        order = torch.randperm(SHAPE.vocabulary, generator=torch.Generator().manual_seed(3))
        renamed = {name: tensor[order] if name in SHARED else tensor for name, tensor in tensors.items()}
        async with Pusher.over(client) as pusher:
            await pusher.push(of_policy(renamed, old, None), 5)
            shared = await accept_length(
                client
            )  # the same model under other ids: a draft that is not pushed has its embedding and its head
    assert min(known, learned, again, shared) > 1.4 * max(stale, behind), (known, stale, learned, behind, again, shared)


@pytest.mark.extra
@pytest.mark.parametrize("kind", ["ngram", "draft"])
def test_versions_from_disk_leave_another_draft_as_it_is(kind: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """One of another shape, and none at all; SGLang would load the policy into it, and end."""
    write_tiny_model(tmp_path / "draft", seed=3, shape=TinyModelShape(hidden_size=32, num_layers=1, max_positions=2048))
    flags = dict(OF_KIND[kind]) | ({DRAFT: str(tmp_path / "draft")} if kind == "draft" else {})
    prompt, sampling = np.array([5, 6, 7] * 4, np.int32), Sampling(temperature=0, max_new_tokens=24)

    async def loaded(engine: EngineProcess) -> None:
        async with await EngineClient.connect(engine.receiver) as client:
            await client.open_receivers()
            for version in (1, 2):
                await client.update_weights_from_disk(str(checkpoint(version).path), version)
                (one,) = await client.generate_group([GenerationRequest(prompt, 24, ignore_eos=True)], sampling)
                with torch.no_grad():
                    logits = checkpoint(version).model(torch.tensor([[*prompt, *one.tokens]])).logits[0, len(prompt) - 1 : -1]
                assert one.tokens.tolist() == logits.argmax(-1).tolist() and one.spans[0].version == version and one.verifications

    with running_engine(checkpoint(0).path, tmp_path, flags) as engine:
        asyncio.run(loaded(engine))


@pytest.mark.extra(each=True)
def test_deepseeks_draft_is_pushed_as_its_layer(tmp_path: Path) -> None:
    make_checkpoint("deepseek_v3", tmp_path)
    character_tokenizer(PRINTABLE[: VOCAB - 4]).save_pretrained(tmp_path)
    tensors, config = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors |= {name.replace(last, draft): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    tensors |= {f"{draft}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{draft}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    changed = {name: tensor * 1.1 for name, tensor in sorted(tensors.items())}

    async def pushed(engine: EngineProcess) -> None:
        async with await EngineClient.connect(engine.receiver) as client:
            await client.open_receivers()
            async with Pusher.over(client) as pusher:
                await pusher.push(dict(sorted(tensors.items())), 1)
                await pusher.push(changed, 2)
                (checked,) = await pusher.send(pusher.sent, 2, check=True)
                assert checked.differences == {} and checked.digest == pusher.digest
            sampling = Sampling(temperature=1, max_new_tokens=24)
            (one,) = await client.generate_group([GenerationRequest(PROMPT, 24, ignore_eos=True)], sampling)
            assert one.verifications and np.allclose(one.log_probs, await scored(client, np.concatenate([PROMPT, one.tokens])), atol=1e-4)

    with running_engine(tmp_path, tmp_path, dict(OF_KIND["mtp"])) as engine:
        asyncio.run(pushed(engine))
