"""Pictures, and sounds, in the requests of clients: found, refused, and carried on over turns by the very tokens."""

import asyncio
import base64
import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.gateway.chat_tokens import ChatTokens
from services.gateway.turn_decisions import digests
from services.gateway.turn_pictures import TurnPictures
from services.gateway.turns import Turns
from shared.config.data_sections import DataSection
from shared.config.service_sections import GatewaySection
from shared.data.media import MediaReader
from shared.formats import anthropic_messages, openai_chat, openai_responses
from shared.formats.request import ChatTurn, TurnRefused, pictures_in
from shared.runtime.traces import Traces
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionLog, Turn, trajectories
from tests.support.tables import table
from tests.support.tiny_audio import AUDIO, BEGIN, END, wav, write_hearing_chat_model
from tests.support.tiny_vision import IMAGE, VIDEO, VISION_END, VISION_START, gif, png, write_seeing_chat_model
from tests.unit.shared.test_sounds import written

CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


class Stored:
    """Sessions of which only the pictures are stored."""

    def __init__(self) -> None:
        self.found: dict[str, bytes] = {}

    async def pictures(self, session: str) -> dict[str, bytes]:
        return self.found

    async def add_pictures(self, session: str, pictures: dict[str, bytes]) -> None:
        self.found |= pictures


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    write_seeing_chat_model(path)
    return path


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hearing")
    write_hearing_chat_model(path)
    return path


tokens_of = functools.cache(lambda model, kind: ChatTokens(model, {}, kind=kind))


class Gateway:
    """A gateway's turns, whose answers are given."""

    def __init__(self, model: Path, kind: str = "image", **data: Any) -> None:
        session = {"id": "s", "group": "g", "rollout": 0, "attempt": 0, "key_digest": "0" * 64, "deadline": 9.0}
        self.log = SessionLog(Session(**session, sampling=Sampling(temperature=1.0, max_new_tokens=100)))
        self.section = DataSection(apply_chat_template=True, multimodal_keys={kind: "shown"}, **data)
        self.sessions: Any = Stored()
        self.reader, self.chat, nothing = MediaReader.of(model, self.section), tokens_of(model, kind), Any
        self.pictures = TurnPictures(self.sessions, self.reader, self.section)
        self.turns = Turns(nothing, nothing, nothing, self.chat, "m", "h", GatewaySection(), Traces(), self.pictures)  # type: ignore[arg-type]

    def turn(self, asked: ChatTurn, answer: str) -> Turn:
        async def made() -> Turn:
            shown = await self.pictures.of(self.log, pictures_in(asked.messages), asked.pictures, asked.place)
            seeing = replace(asked, shown=shown)
            prompt = self.turns._made(self.log, seeing)
            await self.pictures.store(self.log, prompt.pictures, seeing.shown)
            completion = np.asarray(self.chat.tokenizer.encode(answer), np.int32)
            parent = None if prompt.parent is None else prompt.parent.request
            beside = {
                "pictures": prompt.pictures,
                "conversation": digests([*asked.messages, {"role": "assistant", "content": answer}], [])[-1],
            }
            spans, zeros = ((0, len(completion), 0),), np.zeros(len(completion), np.float32)
            turn = Turn(asked.request_id, parent, prompt.tokens, completion, zeros, spans, "stop", **beside)
            self.log.turns[turn.request] = turn
            return turn

        return asyncio.run(made())


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def shown(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data), "detail": "high"}}


def heard(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": kind}}


def block(data: bytes) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def chat(messages: list[Any], name: str = "r") -> ChatTurn:
    return openai_chat.parse(json.dumps({"model": "m", "messages": messages}).encode(), name)


def test_a_conversation_goes_on_by_the_very_tokens_with_the_pictures_of_tools(model: Path) -> None:
    """The second turn's answer is spelled as no template would; other pictures of the same size are another conversation."""
    gateway, one, two = Gateway(model), png(20, 20, seed=1), png(40, 24, seed=2)
    rule = gateway.reader.rule
    messages: list[Any] = [{"role": "user", "content": [text("see"), shown(one), text("and?")]}]
    first = gateway.turn(chat(messages, "r0"), "a  b")
    assert gateway.chat.family == "qwen3" and gateway.chat.picture_texts == [f"{VISION_START}{IMAGE}{VISION_END}"]
    assert int((first.prompt == rule.token).sum()) == rule.tokens(20, 20)
    messages += [{"role": "assistant", "content": "a  b"}, {"role": "user", "content": [shown(two)]}]
    second = gateway.turn(chat(messages, "r1"), "<tool_call> odd")
    assert second.parent == "r0" and np.array_equal(second.prompt[: len(first.tokens)], first.tokens)
    assert second.pictures == (*first.pictures, *pictures_in(chat(messages).messages[2:]))
    assert int((second.prompt == rule.token).sum()) == rule.tokens(20, 20) + rule.tokens(40, 24)
    changed = [{**messages[0], "content": [text("see"), shown(png(20, 20, seed=3)), text("and?")]}, *messages[1:]]
    other = gateway.turn(chat(changed, "r2"), "a")
    assert other.parent is None and np.array_equal(other.prompt[: len(first.tokens)], first.tokens)
    [joined, apart] = trajectories(gateway.log.turns.values())
    assert joined.pictures == second.pictures and apart.pictures == other.pictures
    assert gateway.sessions.found.keys() == {*second.pictures, *other.pictures}
    again = Gateway(model)  # which has the log alone, and the pictures of the store
    again.sessions.found = gateway.sessions.found
    found = asyncio.run(again.pictures.of(again.log, second.pictures, {}, "input"))
    assert {name: picture.data for name, picture in found.items()} == {name: gateway.sessions.found[name] for name in second.pictures}


def test_all_formats_show_the_same(model: Path) -> None:
    data = png(20, 20)
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    by_openai = chat([{"role": "user", "content": [text("a"), text("b"), shown(data)]}, called,
                      {"role": "tool", "tool_call_id": "c", "content": [text("c"), shown(data)]}])  # fmt: skip
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("c"), block(data)]}
    messages = [{"role": "user", "content": [text("a"), text("b"), block(data)]}, {"role": "assistant", "content": [use]},
                {"role": "user", "content": [result]}]  # fmt: skip
    by_anthropic = anthropic_messages.parse(json.dumps({"model": "m", "max_tokens": 9, "messages": messages}).encode(), "r")
    picture = {"type": "input_image", "image_url": url(data)}
    items = [{"role": "user", "content": [text("a"), text("b"), picture]},
             {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 1}'},
             {"type": "function_call_output", "call_id": "c", "output": [text("c"), picture]}]  # fmt: skip
    by_responses = openai_responses.parse(json.dumps({"model": "m", "input": items}).encode(), "r")
    assert list(by_openai.messages) == list(by_anthropic.messages) == list(by_responses.messages)
    assert by_openai.pictures == by_anthropic.pictures == by_responses.pictures and list(by_openai.pictures.values()) == [data]
    assert "a\nb" in by_openai.messages[0]["content"]
    gateway = Gateway(model)
    tokens = gateway.turn(by_openai, "x").prompt
    assert int((tokens == gateway.reader.rule.token).sum()) == 2 * gateway.reader.rule.tokens(20, 20)


REFUSED: dict[str, tuple[list[Any] | str, str]] = {
    "an address": ([{"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}], "addresses are not asked for"),
    "no base64": ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,%%"}}], "expected base64"),
    "too many": ([shown(png(20, 20))] * 4, "max_pictures = 3"),
    "a place without a picture": (f"{VISION_START}{IMAGE}", ""),  # text of a client's is text
    "a sound": ([{"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "wav"}}], "expected a picture of PNG"),
    "a part's further field": ([{**shown(png(20, 20)), "min_pixels": 3}], "unknown parameter"),
}


BAD: dict[str, tuple[bytes, str]] = {  # all that there are: unit/shared/test_pictures.py, of the same reader
    "nothing": (b"", "expected 1 to max_picture_bytes"),
    "a PNG cut short": (png(30, 30)[:-40], "cannot be decoded"),
    "too many bytes": (b"\x89PNG" + bytes(1 << 16), "max_picture_bytes = 60000"),
    "a sound": (wav(0.1), "expected a picture of PNG"),
}


@table("wire", ["openai", "anthropic", "responses"])
def test_bad_pictures_are_refused_in_every_format_and_the_next_good_one_is_taken(model: Path, wire: str) -> None:
    gateway, accepted = Gateway(model, max_picture_bytes=60_000, max_picture_pixels=80_000, max_pictures=3), list[str]()

    def asked(data: bytes) -> ChatTurn:
        if wire == "openai":
            return chat([{"role": "user", "content": [text("see"), shown(data)]}])
        if wire == "anthropic":
            body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": [text("see"), block(data)]}]}
            return anthropic_messages.parse(json.dumps(body).encode(), "r")
        items = [{"role": "user", "content": [text("see"), {"type": "input_image", "image_url": url(data)}]}]
        return openai_responses.parse(json.dumps({"model": "m", "input": items}).encode(), "r")

    for name, (data, words) in BAD.items():
        try:
            gateway.turn(asked(data), "x")
            accepted.append(f"{name}: accepted")
        except TurnRefused as error:
            if error.status != 400 or words not in str(error):
                accepted.append(f"{name}: {error.status} {error}")
    assert not accepted and not gateway.sessions.found, "nothing of them is stored"
    assert int((gateway.turn(asked(png(20, 20)), "x").prompt == gateway.reader.rule.token).sum()) == gateway.reader.rule.tokens(20, 20)


@table(("name", "content", "words"), [(name, *row) for name, row in REFUSED.items()])
def test_what_is_no_picture_is_refused_by_its_field(model: Path, name: str, content: list[Any] | str, words: str) -> None:
    gateway = Gateway(model, max_picture_bytes=60_000, max_picture_pixels=80_000, max_pictures=3)
    if not words:
        assert not (gateway.turn(chat([{"role": "user", "content": content}]), "x").prompt == gateway.reader.rule.token).any()
        return
    with pytest.raises(TurnRefused, match=re.escape(words)) as refused:
        gateway.turn(chat([{"role": "user", "content": content}]), "x")
    assert refused.value.status == 400 and str(refused.value.field).startswith("messages")


def test_pictures_that_are_not_there_are_refused(model: Path) -> None:
    gateway = Gateway(model)
    blind = TurnPictures(gateway.sessions, None, gateway.section)
    with pytest.raises(TurnRefused, match="expected text"):
        asyncio.run(blind.of(gateway.log, ["0" * 64], {"0" * 64: png(20, 20)}, "messages"))
    with pytest.raises(TurnRefused, match="send it again"):
        asyncio.run(gateway.pictures.of(gateway.log, ["0" * 64], {}, "input"))
    with pytest.raises(TurnRefused, match="3 token ids stand for pictures"):
        gateway.pictures.check(np.full(3, gateway.reader.rule.token, np.int32), (), {}, "token_ids")
    body = {"model": "m", "input": [{"role": "developer", "content": [{"type": "input_image", "image_url": url(png(20, 20))}]}]}
    with pytest.raises(TurnRefused, match="users and tools"):
        openai_responses.parse(json.dumps(body).encode(), "r")
    with pytest.raises(TurnRefused, match="with the request that shows them"):
        openai_responses.parse_items(json.dumps({"items": [{**body["input"][0], "role": "user"}]}).encode())


def test_a_conversation_goes_on_with_the_sounds_of_users_and_tools(hearing: Path) -> None:
    """The template numbers sounds: a turn that is carried on counts those before it. Other sounds of the same length are another one."""
    gateway, one, two = Gateway(hearing, "audio"), wav(0.5, seed=1), wav(0.3, rate=8000, seed=2)
    rule, place = gateway.reader.rule, f"{BEGIN}{AUDIO}{END}"
    assert gateway.chat.picture_texts == ["Audio ", f": {place}"]
    messages: list[Any] = [{"role": "user", "content": [text("hear"), heard(one), text("and?")]}]
    first = gateway.turn(chat(messages, "r0"), "<tool_response> odd")
    assert int((first.prompt == rule.token).sum()) == rule.tokens(8000)
    called = {"role": "assistant", "content": "<tool_response> odd", "tool_calls": []}
    messages += [called, {"role": "user", "content": [heard(two), heard(one)]}]
    second = gateway.turn(chat(messages, "r1"), "a")
    assert second.parent == "r0" and np.array_equal(second.prompt[: len(first.tokens)], first.tokens)
    shown = gateway.chat.text(rule.unexpanded(second.prompt).tolist())
    assert [f"Audio {number}: {place}" in shown for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert shown == gateway.chat.text(gateway.chat.render(chat(messages).messages, ()).tolist()), "as the template has it from the start"
    changed = [{"role": "user", "content": [text("hear"), heard(wav(0.5, seed=3)), text("and?")]}, *messages[1:]]
    assert gateway.turn(chat(changed, "r2"), "a").parent is None
    [joined, apart] = trajectories(gateway.log.turns.values())
    assert joined.pictures == second.pictures and len(apart.pictures) == 3
    tool = [
        messages[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c", "content": [heard(two)]},
    ]
    assert int((gateway.turn(chat(tool, "r3"), "a").prompt == rule.token).sum()) == rule.tokens(8000) + rule.tokens(4800)


BAD_SOUNDS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "expected 1 to max_picture_bytes"),
    "a picture": (png(20, 20), "expected a sound of WAV"),
    "a WAV cut short": (wav(0.5)[:4000], "expected a whole WAV"),
    "too many bytes": (wav(1.9, rate=24000), "max_picture_bytes = 80000"),
}


def test_bad_sounds_are_refused_by_name_and_the_next_good_one_is_taken(hearing: Path) -> None:
    gateway, wrong = Gateway(hearing, "audio", max_picture_bytes=80_000, max_sound_seconds=2, max_pictures=3), list[str]()
    call = [{"role": "user", "content": "hear"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    rows = [([heard(data)], words) for data, words in BAD_SOUNDS.values()]
    rows += [([heard(wav(0.2))] * 4, "max_pictures = 3 sounds, found 4"), ([heard(wav(0.2), "aiff")], "'wav', 'mp3'"),
             ([{"type": "input_audio", "input_audio": {"data": "%%", "format": "wav"}}], "expected base64"),
             ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav", "speed": 2}}], "unknown parameter"),
             ([shown(png(20, 20))], "expected a sound of WAV")]  # fmt: skip
    for content, words in rows:
        for before in ([], call):
            said = {"role": "tool", "tool_call_id": "c", "content": content} if before else {"role": "user", "content": content}
            try:
                gateway.turn(chat([*before, said]), "x")
                wrong.append(f"{words}: accepted")
            except TurnRefused as error:
                if error.status != 400 or words not in str(error) or not str(error.field).startswith("messages"):
                    wrong.append(f"{words}: {error.status} {error.field} {error}")
    assert not wrong and not gateway.sessions.found, "nothing of them is stored"
    for kind in ("MP3", "FLAC", "OGG"):
        good = heard(written(0.3 * np.sin(np.arange(8000) / 9), format=kind), kind.lower())
        assert (gateway.turn(chat([{"role": "user", "content": [good]}], kind), "x").prompt == gateway.reader.rule.token).any()
    assert all(one[:4] == b"RIFF" for one in gateway.sessions.found.values())


def test_a_conversation_shows_videos(tmp_path: Path) -> None:
    write_seeing_chat_model(tmp_path, "qwen2_5_vl")
    gateway, given = Gateway(tmp_path, "video", max_picture_bytes=25_000, max_video_frames=4), gif(60, 60, [700, 700])
    assert gateway.chat.picture_texts == [f"{VISION_START}{VIDEO}{VISION_END}"]

    def watched(data: bytes) -> dict[str, Any]:
        return {"type": "video_url", "video_url": {"url": "data:image/gif;base64," + base64.b64encode(data).decode()}}

    stored = gateway.reader.prepared(given)
    assert stored == gateway.reader.prepared(stored.data), "what an agent is given of its prompt is taken as it is"
    asked = [{"role": "user", "content": [watched(given)]}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
             {"role": "tool", "tool_call_id": "c", "content": [text("here"), watched(stored.data)]}]  # fmt: skip
    tokens = gateway.turn(chat(asked), "x").prompt
    assert int((tokens == gateway.reader.rule.token).sum()) == 2 * stored.tokens and set(gateway.sessions.found.values()) == {stored.data}
    wrong = [(gif(60, 60, [700] * 4), "max_video_frames = 4 frames, found 5"), (wav(0.2), "expected a video of PNG"),
             (stored.data[:-90], "whole"),
             (gif(60, 60, [100] * 8), "max_picture_bytes = 25000"), (b"\x00frames\n", "expected a video of PNG")]  # fmt: skip
    for data, words in wrong:
        with pytest.raises(TurnRefused, match=words) as refused:
            gateway.turn(chat([{"role": "user", "content": [watched(data)]}]), "x")
        assert refused.value.status == 400 and refused.value.code == "invalid_video"
