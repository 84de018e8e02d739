"""Agents that see, or hear, over the whole way: rollout service, gateway, a real engine, and the trainer that computes the same."""

import itertools
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from services.gateway.chat_tokens import ChatTokens
from services.rollout.agent_runner import with_pictures
from services.rollout.engine.engine_client import EngineClient
from services.rollout.engine.engine_process import EngineProcess
from services.trainer.fsdp.picture_inputs import MediaInputs
from services.trainer.packing import pack
from services.trainer.parallel import runtime
from shared.config.data_sections import DataSection
from shared.data.media import MediaReader, picture_check
from shared.formats.openai_chat import parse
from shared.formats.request import pictures_in
from shared.schema.digests import reference
from shared.schema.messages import Sampling
from shared.schema.sample import SampleLimits
from tests.integration.engine.conftest import Checkpoint, fresh_client, running_engine
from tests.integration.engine.hall import NewHall
from tests.support import agents
from tests.support.tiny_audio import wav, write_hearing_chat_model
from tests.support.tiny_vision import png, write_seeing_chat_model
from tests.unit.trainer.megatron.rank_steps import actor

pytestmark = [pytest.mark.timeout(900), pytest.mark.extra(each=True)]  # test_pictures.py has pictures on an engine

STEPS, SURE = 600, 0.02

MARK = "<tool_response>"
ANSWERS = ("kim", MARK + '\n<tool_call>\n{"name": "zoom", "arguments": {}}\n</tool_call>', "tom")


def asking(kind: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "who is it?"}]}]


def script(chat: ChatTokens, reader: MediaReader, picture: bytes) -> tuple[list[int], list[int], list[bytes]]:
    """The ids of the conversation that is learned by heart, which of them are the model's, and its pictures, as they are stored. The model
    spells a mark by its letters, as no tokenizer does."""
    first = with_pictures(asking(reader.kind), [picture])
    shown = agents.middle_of(first[0]["content"][0])
    call = {"id": "c", "type": "function", "function": {"name": "zoom", "arguments": "{}"}}
    then = [{"role": "assistant", "content": "kim"}, {"role": "user", "content": [{"type": "text", "text": "look"}, shown]},
            {"role": "assistant", "content": MARK, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": [shown]}]  # fmt: skip
    ids, learned, known = list[int](), list[int](), list[int]()
    for turn, answer in enumerate(ANSWERS):
        body = {"model": "m", "messages": first + then[: 2 * turn], "tools": agents.ZOOM}
        asked = parse(json.dumps(body).encode(), "r")
        pictures = [reader.prepared(asked.pictures[name]) for name in pictures_in(asked.messages)]
        prompt = reader.rule.expanded(chat.render(asked.messages, asked.tools), [one.tokens for one in pictures]).tolist()
        assert prompt[: len(known)] == known
        spelled, end = chat.tokenizer.encode(answer).tolist(), chat.tokenizer.token_id("<|im_end|>")
        letters, rest = (answer[: len(MARK)], answer[len(MARK) :]) if answer.startswith(MARK) else ("", answer)
        said = [one for text in (*letters, rest) for one in chat.tokenizer.encode(text).tolist()]
        learned += [0] * (len(prompt) - len(known)) + [1] * len([*said, end])
        ids += [*prompt[len(known) :], *said, end]
        known = [*prompt, *spelled, end]
    return ids, learned, [one.data for one in pictures]


def teach(model: Any, path: Path, kind: str, ids: list[int], learned: list[int], pictures: list[bytes]) -> None:
    """Has a checkpoint's model learn a conversation by heart."""
    model.train()
    optimizer = torch.optim.AdamW(
        [one for name, one in model.named_parameters() if not re.search("visual|audio_tower", name)], lr=3e-3, weight_decay=0.0
    )
    inputs, tokens, wanted = MediaInputs.of(path, model, kind), torch.tensor([ids]), torch.tensor(learned[1:])
    shown = inputs._pixels(pictures)
    shown |= {} if "input_features" in shown else {"mm_token_type_ids": (tokens == inputs.rule.token).int()}
    for _ in range(STEPS):
        logits = model(input_ids=tokens, **shown).logits[0, :-1]
        losses = functional.cross_entropy(logits, tokens[0, 1:], reduction="none") * wanted
        if float(losses.detach().max()) < SURE:
            break
        optimizer.zero_grad()
        (losses.sum() / wanted.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    else:
        raise AssertionError(f"after {STEPS} steps a token has a loss of {float(losses.detach().max()):.3g}")
    model.save_pretrained(path / "taught")
    saved = load_file(path / "taught" / "model.safetensors")
    save_file({name.replace("model.model.", "model."): one for name, one in saved.items()}, path / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module", params=["image", "audio"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def picture(kind: str) -> bytes:
    return png(61, 40) if kind == "image" else wav(0.8, rate=22050, channels=2)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, kind: str, picture: bytes) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    model = (write_seeing_chat_model if kind == "image" else write_hearing_chat_model)(path)
    reader = MediaReader.of(path, DataSection(apply_chat_template=True, multimodal_keys={kind: "shown"}))
    teach(model, path, kind, *script(ChatTokens(path, {}, kind=kind), reader, reader.prepared(picture).data))
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


async def test_an_agent_is_shown_pictures_by_its_tool(room: NewHall, seeing: Path, kind: str, picture: bytes) -> None:
    data = {"label_key": "", "apply_chat_template": True, "multimodal_keys": {kind: "shown"}}
    sections = {"model": {"hf_checkpoint": str(seeing)}, "trainer": {"trainer_backend": "torch"}}
    played = await room("tests.support.agents:zooms", data=data, **sections)
    desk = played.desk
    reader = MediaReader.of(seeing, played.desk.service.config.data)
    stored = reader.prepared(picture)
    [key] = itertools.islice(desk.service.subjects.picture_keys("g00000007", 0), 1)
    payload = reference(desk.service.run, {key: stored.data})
    await desk.service.store.write({key: stored.data}, deadline=60)
    ids, learned, pictures = script(ChatTokens(seeing, {}, kind=kind), reader, stored.data)
    await desk.task(n=2, prompt=asking(kind), pictures=payload, sampling=Sampling(temperature=0.0, max_new_tokens=60))
    _, samples = await desk.generated()
    for one in samples:
        assert one.problem(SampleLimits(pictures=picture_check(desk.service.config))) is None and one.given_reward == 7.0
        assert [*one.prompt.tolist(), *one.response.tolist()] == ids, "one trajectory, of the very tokens"
        assert one.mask.tolist() == learned[len(one.prompt) :] and list(one.pictures) == pictures
    model = actor(seeing, trainer_backend="torch", shows=kind)
    try:
        batch = pack(samples, [1.0] * len(samples))
        (log_probs,) = model.log_probs([batch])
    finally:
        runtime.stop()
    trained = batch.loss_mask > 0
    assert int(trained.sum()) == 2 * sum(learned)
    assert (log_probs - batch.fields["rollout_log_probs"])[trained].abs().max() < 1e-4
