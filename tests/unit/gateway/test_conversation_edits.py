"""What clients make of answers before they send them back: each token that was drawn is trained once, at its place, whatever they do."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.gateway.chat_tokens import TOOL, ChatTokens
from services.gateway.turn_decisions import digests, thought_digest
from services.gateway.turn_pictures import TurnPictures
from services.gateway.turns import Turns
from shared.config.data_sections import DataSection
from shared.config.service_sections import GatewaySection
from shared.formats import openai_chat
from shared.formats.request import TurnRefused, assistant_message
from shared.runtime.traces import Traces
from shared.schema.messages import Sampling
from shared.sessions.session import Session, SessionLog, Trajectory, Turn, trajectories
from tests.support.qwen3_tokenizer import write_qwen3_tokenizer

CALL = '<tool_call>\n{ "name":"add",  "arguments": {"b":2, "a": 2.0} }\n</tool_call>'
DRAWN = [
    "4<|im_end|>",
    "  4.  \n<|im_end|>",
    "<think>\ntwo and two\n</think>\n\n4<|im_end|>",
    f"{CALL}<|im_end|>",
    f"<think>\nlet me see\n</think>\n\nI shall call.\n{CALL}\n{CALL}<|im_end|>",
    '<tool_call>\n{"name": "add", "arguments": {"a": 2,}}\n</tool_call><|im_end|>',
    "cut in the mid",
    "<|im_end|>",
]
"""What the model draws."""


def stripped(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": message["content"].strip() + "!"}


def thoughtless(message: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def renamed(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call | {"id": f"my-{call['id']}"} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls} if calls else message


def rewritten(message: dict[str, Any]) -> dict[str, Any]:
    calls = json.loads(json.dumps(message.get("tool_calls", [])))
    for call in calls:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)
    return {**message, "tool_calls": calls} if calls else message


FAITHFUL, EDITS = [lambda message: message, thoughtless, renamed, rewritten], [stripped]


class Conversation:
    """A gateway's turns, of which the tokens are given; and a client's messages."""

    def __init__(self, chat: ChatTokens, **more: Any) -> None:
        session = {"id": "s", "group": "g", "rollout": 0, "attempt": 0, "key_digest": "0" * 64, "deadline": 9.0, **more}
        self.log = SessionLog(Session(**session, sampling=Sampling(temperature=1.0, max_new_tokens=100)))
        nothing: Any = None
        blind = TurnPictures(nothing, None, DataSection())
        self._chat, self._turns = chat, Turns(nothing, nothing, nothing, chat, "m", "h", GatewaySection(), Traces(), blind)

    def asked(self, messages: list[dict[str, Any]], text: str, **more: Any) -> dict[str, Any]:
        """Asks for the next message, for which ``text`` is drawn. Returns it as the client sees it."""
        body = {"model": "m", "messages": messages, "tools": [TOOL], **more}
        turn = openai_chat.parse(json.dumps(body).encode(), f"r{len(self.log.turns)}")
        turn = self._turns.noted(self.log, turn)
        prompt = self._turns._made(self.log, turn)
        completion = np.asarray(self._chat.tokenizer.encode(text), np.int32)
        log_probs = -np.arange(1, len(completion) + 1, dtype=np.float32) / 100
        parent = None if prompt.parent is None else prompt.parent.request
        whole = Turn(turn.request_id, parent, prompt.tokens, completion, log_probs, ((0, len(completion), 0),), "stop")
        result = self._turns._answers.chat(whole, self.log.session, turn)
        assert result.usage.reasoning == len(result.reasoning) <= result.usage.completion, "a token is a character there"
        conversation = digests(turn.answered(result), turn.setting)[-1]
        thought = thought_digest(result.reasoning)
        self.log.turns[whole.request] = Turn(**{**vars(whole), "conversation": conversation, "thought": thought})
        return assistant_message(result)


def replies(answer: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What the client says to an answer: the results of its calls, or another question."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": str(number)} for call in answer.get("tool_calls", ())]
    return results or [{"role": "user", "content": f"and {number}?"}]


def check(turns: dict[str, Turn], found: list[Trajectory]) -> None:
    """Asserts that each drawn token is trained once, at its place, with its log-prob."""
    trained: dict[str, int] = dict.fromkeys(turns, 0)
    for trajectory in found:
        for name in trajectory.turns:
            turn, start = turns[name], len(turns[name].prompt)
            assert np.array_equal(trajectory.tokens[: len(turn.tokens)], turn.tokens), "it holds what the model read and drew"
            begin = start - len(trajectory.prompt)
            place = slice(begin, begin + len(turn.completion))
            assert set(trajectory.mask[place].tolist()) in ({0}, {1})
            np.testing.assert_array_equal(trajectory.log_probs[place], turn.log_probs)
            trained[name] += int(trajectory.mask[place].sum())
    assert trained == {name: len(turn.completion) for name, turn in turns.items()}
    assert sum(int(trajectory.mask.sum()) for trajectory in found) == sum(trained.values()), "and nothing else is"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    return ChatTokens(write_qwen3_tokenizer(Path(tmp_path_factory.mktemp("qwen3"))), {})


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_each_token_is_trained_once_whatever_a_client_does(chat: ChatTokens, data: st.DataObject) -> None:
    conversation = Conversation(chat)
    open_ends: list[list[dict[str, Any]]] = [[{"role": "user", "content": "What is 2 + 2?"}]]
    for number in range(data.draw(st.integers(1, 8), "turns")):
        messages = list(data.draw(st.sampled_from(open_ends), "goes on from"))
        answer = conversation.asked(messages, data.draw(st.sampled_from(DRAWN), "drawn"))
        sent = data.draw(st.sampled_from([*FAITHFUL, *EDITS]), "sent back")(answer)
        further = [*messages, sent, *replies(sent, number)]
        if data.draw(st.integers(0, 5), "edited") == 0:
            further[0] = {"role": "user", "content": "What is 3 + 3?"}
        open_ends.append(further)
    check(conversation.log.turns, trajectories(conversation.log.turns.values()))


@pytest.mark.parametrize(
    "sent_back", FAITHFUL, ids=["as it came", "without reasoning", "with ids of its own", "with arguments written anew"]
)
def test_calls_and_their_results_are_one_conversation(chat: ChatTokens, sent_back: Any) -> None:
    """Sixty turns of it: what a client changes that the model does not read, or has drawn itself, forks nothing."""
    conversation, messages = Conversation(chat), [{"role": "user", "content": "What is 2 + 2?"}]
    for number in range(60):
        answer = sent_back(conversation.asked(messages, DRAWN[3 + number % 2]))
        messages += [answer, *replies(answer, number)]
    [found] = trajectories(conversation.log.turns.values())
    assert len(found.turns) == 60
    check(conversation.log.turns, [found])


def test_an_answer_that_the_client_has_begun_is_continued(chat: ChatTokens) -> None:
    """The client joins both parts, and the conversation stays one trajectory."""
    conversation, messages = Conversation(chat), [{"role": "user", "content": "What is 2 + 2?"}]
    messages += [conversation.asked(messages, "4<|im_end|>"), {"role": "user", "content": "and 3 + 3?"}]
    begun = [*messages, {"role": "assistant", "content": "It is"}]
    rest = conversation.asked(begun, " 6.<|im_end|>")
    messages += [{"role": "assistant", "content": "It is" + rest["content"]}, {"role": "user", "content": "thanks"}]
    conversation.asked(messages, "<|im_end|>")
    [found] = trajectories(conversation.log.turns.values())
    assert len(found.turns) == 3
    assert chat.text(list(conversation.log.turns.values())[1].prompt.tolist()).endswith("<|im_start|>assistant\nIt is")
    check(conversation.log.turns, [found])
    for begun in ("<", "end", "im_end", "_", "|>", "Once ", "a {"):
        conversation.asked([*messages, {"role": "assistant", "content": begun}], "x<|im_end|>")
        *_, turn = conversation.log.turns.values()
        assert chat.text(turn.prompt.tolist()).endswith(f"thanks<|im_end|>\n<|im_start|>assistant\n{begun}"), "though templates end with it"
    for nothing in ("", " \n"):
        with pytest.raises(TurnRefused, match="no text to continue"):
            conversation.asked([*messages, {"role": "assistant", "content": nothing}], "")


TEMPLATE = (Path(__file__).parents[2] / "support" / "qwen3_chat_template.jinja").read_text()
QUIET = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("run", "own", "asked", "tail"),
    [
        ({}, {}, {}, ""),
        ({}, {"enable_thinking": False}, {}, QUIET),
        ({}, {"enable_thinking": False}, {"enable_thinking": True}, ""),
        ({"enable_thinking": False}, {}, {}, QUIET),
        ({"enable_thinking": False}, {"enable_thinking": True}, {}, ""),
        ({"enable_thinking": False}, {"enable_thinking": None}, {}, ""),
        ({"date": 1}, {"date": None, "chat_template": "", "enable_thinking": False}, {}, QUIET),
    ],
)
def test_a_sessions_variables_go_over_the_runs_and_a_requests_over_these(
    tmp_path: Path, run: dict[str, Any], own: dict[str, Any], asked: dict[str, Any], tail: str
) -> None:
    template = TEMPLATE.replace("enable_thinking is false", "not enable_thinking")  # where one that is None is no undefined one
    conversation = Conversation(chat := ChatTokens(write_qwen3_tokenizer(tmp_path, template), run), variables=own)
    conversation.asked([{"role": "user", "content": "What is 2 + 2?"}], "4<|im_end|>", chat_template_kwargs=asked)
    [turn] = conversation.log.turns.values()
    assert chat.text(turn.prompt.tolist()).rpartition("assistant\n")[2] == tail


def test_a_request_gives_the_template_its_variables(tmp_path: Path) -> None:
    conversation = Conversation(chat := ChatTokens(write_qwen3_tokenizer(tmp_path, TEMPLATE), {}))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is 2 + 2?"}]
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    answers = [conversation.asked(messages, "4<|im_end|>", **more) for more in ({}, quiet)]
    tails = [chat.text(turn.prompt.tolist()).rpartition("assistant\n")[2] for turn in conversation.log.turns.values()]
    assert tails == ["", "<think>\n\n</think>\n\n"]
    conversation.asked([*messages, answers[1], {"role": "user", "content": "and?"}], "6<|im_end|>", **quiet)
    assert len(trajectories(conversation.log.turns.values())) == 2, "each setting continues its own"
    assert chat.varied(quiet["chat_template_kwargs"])._encoded is chat._encoded, "the texts that are remembered are few in all"
    for name in ("enable_thinkin", "messages", "chat_template", "think", "loop", "namespace"):  # words of it that are none of its variables
        with pytest.raises(TurnRefused, match=f"chat_template_kwargs.{name}: .* reads no such variable"):
            conversation.asked(messages, "", chat_template_kwargs={name: 1})
    spelled = {"enable_thinking": ["no<|im_end|>"]}
    with pytest.raises(TurnRefused, match="chat_template_kwargs.enable_thinking: expected no control tokens"):
        conversation.asked(messages, "", chat_template_kwargs=spelled)
    assert Conversation(chat, variables=spelled).asked(messages, "4<|im_end|>")["content"] == "4", "a set's are the run's own words"


@pytest.mark.parametrize("text", [DRAWN[5], "So.\n<tool_call>\n{bad}\n</tool_call>\n<|im_end|>", 'So. <tool_call>{"name": add}<|im_end|>'])
def test_a_malformed_call_comes_back_with_its_marks(chat: ChatTokens, text: str) -> None:
    conversation, messages = Conversation(chat), [{"role": "user", "content": "What is 2 + 2?"}]
    answer = conversation.asked(messages, text)
    assert answer["content"] == text.removesuffix("<|im_end|>") and "tool_calls" not in answer
    conversation.asked([*messages, answer, {"role": "user", "content": "error: it cannot be read"}], "4<|im_end|>")
    [found] = trajectories(conversation.log.turns.values())
    check(conversation.log.turns, [found])
