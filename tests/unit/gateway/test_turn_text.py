"""What is told of a turn while it is drawn is the beginning of its answer, wherever markers, characters and stop strings are cut."""

import asyncio
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway import routes
from services.gateway.chat_tokens import TOOL, ChatTokens
from services.gateway.routes import StreamedAnswer
from services.gateway.turn_decisions import TurnAnswers, TurnText
from services.gateway.turns import LiveTurn
from shared.formats.anthropic_messages import MessageEvents
from shared.formats.request import ChatTurn, RequestedSampling, TurnDelta, TurnRefused, TurnResult, TurnStart
from shared.schema.messages import Sampling
from shared.sessions.session import Session, Turn, TurnGeneration
from tests.support.byte_tokenizer import MARKERS, write_byte_tokenizer
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.wire_server import PLAIN

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}{# <tool_call> #}"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
PIECES = [
    *MARKERS,
    *("Hello", " world", "\n", " \n\n ", "é", "漢字", "🎉", "a < b", "<div>", "<", "<t", "</th", "{", "STOP", "ST", "OP"),
    *(CALL, CALL[:-12], CALL.replace('"name"', '"nam"'), CALL.replace("{", ""), "<tool", "_call>", "<think>\nso", "</think>\n\nThus"),
]
SESSION = Session(
    id="s", group="g00000001", rollout=0, attempt=0, key_digest="0" * 64, deadline=1, sampling=Sampling(temperature=1, max_new_tokens=9)
)


@pytest.fixture(scope="module", params=["template", "bytes", "no markers"])
def chat(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    """A family's own renderer; the model's template with markers as tokens; the same with all of them spelled out."""
    path: Path = tmp_path_factory.mktemp("model")
    if request.param == "template":
        return ChatTokens(write_qwen3_tokenizer(path), {})
    return ChatTokens(write_byte_tokenizer(path, TEMPLATE, MARKERS if request.param == "bytes" else MARKERS[:3]), {})


def answered(chat: ChatTokens, prompt: list[int], ids: list[int], asked: ChatTurn, finish: str) -> TurnResult:
    count = len(ids)
    drawn = np.array(ids, np.int32), np.zeros(count, np.float32), ((0, count, 0),)
    return TurnAnswers(chat, "m").chat(Turn("r" * 30, None, np.array(prompt, np.int32), *drawn, finish), SESSION, asked)  # type: ignore[arg-type]


def until_stop(chat: ChatTokens, ids: list[int], stops: list[str]) -> tuple[list[int], str]:
    """What an engine would have drawn of the tokens."""
    for count in range(1, len(ids) + 1):
        if ids[count - 1] in chat.stop_ids or any(stop in chat.text(ids[:count]) for stop in stops):
            return ids[:count], "stop"
    return ids, "length"


@settings(max_examples=250, deadline=None)
@given(
    spelled=st.lists(st.sampled_from(PIECES), max_size=10),
    cut=st.lists(st.integers(0, 30), max_size=4),
    opened=st.booleans(),
    stops=st.sampled_from([[], ["STOP"], ["\n\n", "<di"]]),
    tools=st.booleans(),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=6),
)
def test_the_deltas_are_the_answer(
    chat: ChatTokens, spelled: list[str], cut: list[int], opened: bool, stops: list[str], tools: bool, steps: list[int]
) -> None:
    ids = chat.tokenizer.encode("".join(spelled)).tolist()
    for at in cut:  # markers and characters break at any place
        del ids[at : at + 1]
    ids, finish = until_stop(chat, ids, stops)
    prompt = chat.tokenizer.encode("<think>\n" if opened else "hi").tolist()
    given_tools = [TOOL] if tools else []
    asked = ChatTurn(
        request_id="r",
        model=None,
        messages=[{"role": "user", "content": ""}],
        tools=given_tools,
        sampling=RequestedSampling(stop=tuple(stops)),
    )
    whole = answered(chat, prompt, ids, asked, finish)
    text, told, at = TurnText(chat, prompt, given_tools, stops), list[TurnDelta](), 0
    while at < len(ids):
        step = steps[at % len(steps)]
        told += text.add(ids[at : at + step])
        at += step
    told += text.finish(whole)
    assert "".join(piece.content for piece in told) == whole.content
    assert "".join(piece.reasoning for piece in told) == whole.reasoning
    assert [piece.tool_call for piece in told if piece.tool_call] == list(whole.tool_calls)
    kinds = ["reasoning" if piece.reasoning else "content" if piece.content else "call" for piece in told]
    assert kinds == sorted(kinds, key=["reasoning", "content", "call"].index)


def test_plain_text_is_told_at_once_and_a_call_is_held_back(chat: ChatTokens) -> None:
    text, told = TurnText(chat, [], [TOOL], ["STOP"]), ""
    for count, character in enumerate("So a < b, and ST is <b>no</b> stop", 1):
        told += "".join(piece.content for piece in text.add(chat.tokenizer.encode(character).tolist()))
        assert len(told) >= count - 6
    for token in chat.tokenizer.encode(CALL).tolist():
        told += "".join(piece.content for piece in text.add([token]))
    assert told == "So a < b, and ST is <b>no</b> stop"


def test_what_does_not_begin_as_it_was_told_is_refused(chat: ChatTokens) -> None:
    asked = ChatTurn(request_id="r", model=None, messages=[{"role": "user", "content": ""}])
    text = TurnText(chat, [], [], [])
    assert text.add(chat.tokenizer.encode("Hello").tolist())
    for other in ("Jello", ""):
        with pytest.raises(TurnRefused, match="not what was streamed"):
            text.finish(answered(chat, [], chat.tokenizer.encode(other).tolist(), asked, "stop"))


def test_a_stop_string_with_a_special_token_in_it_ends_nothing(chat: ChatTokens) -> None:
    """An engine looks for stop strings in the text with its special tokens; a client is told the text without them."""
    asked = ChatTurn(request_id="r", model=None, messages=[{"role": "user", "content": ""}], sampling=RequestedSampling(stop=("STOP",)))
    ids = chat.tokenizer.encode("Say ST<|im_start|>OP to STOP").tolist()
    whole = answered(chat, [], ids, asked, "stop")
    assert whole.stop_text == "STOP" and whole.content.endswith("OP to ")
    parted = answered(chat, [], ids[: -len(" to STOP")], asked, "stop")
    assert parted.stop_text is None and parted.content.endswith("OP")


async def test_a_stream_whose_text_waits_for_the_end_of_its_turn_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens come all the time, of a call that is shown as a whole: as long as no byte follows, clients hang up."""
    monkeypatch.setattr(routes, "SILENT_SECONDS", 0.0)
    live, turn, heard = LiveTurn(), asyncio.get_running_loop().create_future(), iter(range(5))
    one = TurnGeneration(completion=np.ones(1, np.int32), log_probs=np.zeros(1, np.float32), spans=((0, 1, 0),), finish="abort")

    def add(_tokens: list[int]) -> list[TurnDelta]:
        live.hear(one) if next(heard, None) is not None else turn.set_result(PLAIN)
        return []

    text = Mock(add=add, finish=lambda result: [TurnDelta(content=result.content)])
    start, asked = TurnStart(request_id="r", model="tiny", created=1, prompt=0), ChatTurn(request_id="r", model="m", messages=[])
    answer = StreamedAnswer(turn, live, start, lambda begun: MessageEvents(asked, begun), lambda: text)
    live.hear(one)
    events = [event async for event in answer.events()]
    assert b"message_start" in events[0] and b"message_stop" in events[-1] and answer.ended
    assert len(events) > 3 and {event.split(b"\n")[0] for event in events[1:-1]} == {b"event: ping"}
