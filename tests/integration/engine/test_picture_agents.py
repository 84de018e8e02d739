"""An agent that sees, over the whole way: rollout service, gateway, a real engine, and the trainer that computes the same."""

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from services.gateway.chat_tokens import ChatTokens
from services.gateway.wire.openai_chat import parse
from services.gateway.wire.request import pictures_in
from services.rollout.agent_runner import with_pictures
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.trainer.fsdp.picture_inputs import MediaInputs
from services.trainer.packing import pack
from services.trainer.parallel import runtime
from shared.config.data_sections import DataSection
from shared.data.media import MediaReader, picture_check
from shared.schema.digests import reference
from shared.schema.messages import Sampling
from shared.schema.sample import SampleLimits
from tests.integration.engine.conftest import Checkpoint, fresh_client, running_engine
from tests.integration.engine.hall import NewHall
from tests.support import agents
from tests.support.tiny_vision import png, write_seeing_chat_model
from tests.unit.trainer.megatron.rank_steps import actor

pytestmark = pytest.mark.timeout(900)

STEPS, SURE = 600, 0.02

ASKED = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "who is it?"}]}]
ANSWERS = ('<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>', "kim", "tom")


def script(chat: ChatTokens, reader: MediaReader, picture: bytes) -> tuple[list[int], list[int], list[bytes]]:
    """The ids of the conversation that is learned by heart, which of them are the model's, and its pictures, as they are stored."""
    url = with_pictures(ASKED, [picture])[0]["content"][0]["image_url"]["url"]
    shown = {"type": "image_url", "image_url": {"url": agents.middle_of(url)}}
    call = {"id": "c", "type": "function", "function": {"name": "zoom", "arguments": "{}"}}
    then = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": [shown]},
            {"role": "assistant", "content": "kim"}, {"role": "user", "content": [{"type": "text", "text": "look"}, shown]}]  # fmt: skip
    ids, learned = list[int](), list[int]()
    for turn, answer in enumerate(ANSWERS):
        body = {"model": "m", "messages": with_pictures(ASKED, [picture]) + then[: 2 * turn], "tools": agents.ZOOM}
        asked = parse(json.dumps(body).encode(), "r")
        pictures = [reader.prepared(asked.pictures[name]) for name in pictures_in(asked.messages)]
        prompt = reader.rule.expanded(chat.render(asked.messages, asked.tools), [one.tokens for one in pictures]).tolist()
        assert prompt[: len(ids)] == ids
        said = [*chat.tokenizer.encode(answer).tolist(), chat.tokenizer.token_id("<|im_end|>")]
        learned += [0] * (len(prompt) - len(ids)) + [1] * len(said)
        ids = prompt + said
    return ids, learned, [one.data for one in pictures]


def teach(model: Any, path: Path, ids: list[int], learned: list[int], pictures: list[bytes]) -> None:
    """Has a checkpoint's model learn a conversation by heart."""
    model.train()
    optimizer = torch.optim.AdamW([one for name, one in model.named_parameters() if "visual" not in name], lr=3e-3, weight_decay=0.0)
    inputs, tokens, wanted = MediaInputs.of(path, model), torch.tensor([ids]), torch.tensor(learned[1:])
    pixels, kinds = inputs._pixels(pictures), (tokens == inputs.rule.token).int()
    for _ in range(STEPS):
        logits = model(input_ids=tokens, mm_token_type_ids=kinds, **pixels).logits[0, :-1]
        losses = functional.cross_entropy(logits, tokens[0, 1:], reduction="none") * wanted
        if float(losses.detach().max()) < SURE:
            break
        optimizer.zero_grad()
        (losses.sum() / wanted.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise AssertionError(f"after {STEPS} steps a token has a loss of {float(losses.detach().max()):.3g}")
    state = model.state_dict()
    save_file({name: state[name].contiguous() for name in load_file(path / "model.safetensors")}, path / "model.safetensors")


@pytest.fixture(scope="module")
def picture() -> bytes:
    return png(61, 40)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, picture: bytes) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    model = write_seeing_chat_model(path)
    reader = MediaReader.of(path, DataSection(apply_chat_template=True, multimodal_keys={"image": "images"}))
    teach(model, path, *script(ChatTokens(path, {}), reader, reader.prepared(picture).data))
    return path


@pytest.fixture(scope="module")
def seeing_engine(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with running_engine(seeing, tmp_path_factory.mktemp("engine"), {"disable-radix-cache": False}) as process:
        yield process


@pytest.fixture
async def client(seeing_engine: EngineProcess, seeing: Path) -> AsyncIterator[EngineClient]:
    model: Any = None
    async with fresh_client(seeing_engine, Checkpoint(seeing, model)) as client:
        yield client


async def test_an_agent_is_shown_pictures_by_its_tool(room: NewHall, seeing: Path, picture: bytes, tmp_path: Path) -> None:
    data = {"label_key": "", "apply_chat_template": True, "multimodal_keys": {"image": "images"}}
    sections = {"model": {"hf_checkpoint": str(seeing)}, "trainer": {"trainer_backend": "torch"}}
    played = await room("tests.support.agents:zooms", data=data, **sections)
    desk = played.desk
    reader = MediaReader.of(seeing, played.desk.service.config.data)
    stored = reader.prepared(picture)
    [key] = itertools.islice(desk.service.subjects.picture_keys("g00000007", 0), 1)
    payload = reference(desk.service.run, {key: stored.data})
    await desk.service.store.write({key: stored.data}, deadline=60)
    ids, learned, pictures = script(ChatTokens(seeing, {}), reader, stored.data)
    await desk.task(n=2, prompt=ASKED, pictures=payload, sampling=Sampling(temperature=0.0, max_new_tokens=60))
    _, samples = await desk.generated()
    for one in samples:
        assert one.problem(SampleLimits(pictures=picture_check(desk.service.config))) is None and one.given_reward == 7.0
        assert [*one.prompt.tolist(), *one.response.tolist()] == ids, "one trajectory, of the very tokens"
        assert one.mask.tolist() == learned[len(one.prompt) :] and list(one.pictures) == pictures
    model = actor(seeing, trainer_backend="torch", sees=True)
    try:
        batch = pack(samples, [1.0] * len(samples))
        (log_probs,) = model.log_probs([batch])
    finally:
        runtime.stop()
    trained = batch.loss_mask > 0
    assert int(trained.sum()) == 2 * sum(learned)
    assert (log_probs - batch.fields["rollout_log_probs"])[trained].abs().max() < 1e-4
