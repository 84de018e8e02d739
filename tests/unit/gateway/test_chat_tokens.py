"""Messages become ids and come back; a conversation that goes on keeps the very ids that were sampled."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xgrammar

from services.gateway.chat_tokens import CALL, TOOL, ChatTokens, EncodedTexts, call_status
from shared.data.tokenizer import Tokenizer
from shared.formats.request import ChatTurn, TurnRefused, call_constraint, json_constraint, single_call
from shared.sessions.session import Turn
from tests.support import call_templates
from tests.support.qwen3_tokenizer import TEMPLATE, write_qwen3_tokenizer
from tests.support.tables import table

ASK = [{"role": "user", "content": "What is 2 + 2?"}]
DEEP: dict[str, object] = {}
for _ in range(200):
    DEEP = {"b": DEEP}

RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokens:
    return ChatTokens(write_qwen3_tokenizer(tmp_path_factory.mktemp("qwen3")), {})


def drawn(chat: ChatTokens, text: str, prompt: np.ndarray | None = None) -> Turn:
    completion = np.asarray(chat.tokenizer.encode(text), np.int32)
    asked = chat.render(ASK, [TOOL]) if prompt is None else prompt
    return Turn("r1", None, asked, completion, np.zeros(len(completion)), ((0, len(completion), 0),), "stop")


def test_the_family_whose_renderer_renders_as_the_template_is_taken(chat: ChatTokens, tmp_path: Path) -> None:
    assert chat.family == "qwen3" and chat.stop_ids == sorted(chat.tokenizer.token_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    other = write_qwen3_tokenizer(tmp_path / "other", TEMPLATE.replace("<|im_start|>assistant\\n' }}", "<|im_start|>assistant:' }}"))
    assert ChatTokens(other, {}).family == "default", "a template of one's own is not another's"
    assert ChatTokens(write_qwen3_tokenizer(tmp_path / "kwargs"), {"unheard_of": 1}).family == "default"


def test_a_tool_call_is_carried_on_by_the_very_ids(chat: ChatTokens) -> None:
    """The model spells the call in its own way: with spaces that no template would write."""
    turn = drawn(chat, '<tool_call>\n{ "name":"add",  "arguments": {"b":2, "a": 2.0} }\n</tool_call><|im_end|>')
    [call] = chat.parse(turn, [TOOL]).calls
    assert call.ok and call.name == "add" and call.arguments == {"b": 2, "a": 2.0}
    bridged = chat.bridge(turn, [RESULT], [TOOL])
    assert bridged is not None
    assert bridged[: len(turn.tokens)].tolist() == turn.tokens.tolist()
    rest = chat.tokenizer.decode(bridged[len(turn.tokens) :], skip_special_tokens=False)
    assert rest == "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_a_truncated_turn_is_closed_by_the_prompt(chat: ChatTokens) -> None:
    turn = drawn(chat, "I think that")
    bridged = chat.bridge(turn, [RESULT], [TOOL])
    assert bridged is not None and bridged[: len(turn.tokens)].tolist() == turn.tokens.tolist()
    assert chat.tokenizer.decode(bridged[len(turn.tokens) :], skip_special_tokens=False).startswith("<|im_end|>\n<|im_start|>user")


def test_what_somebody_else_said_for_the_model_is_not_carried_on(chat: ChatTokens) -> None:
    turn = drawn(chat, "4<|im_end|>")
    assert chat.bridge(turn, [{"role": "assistant", "content": "5"}, RESULT], [TOOL]) is None


@table(
    ("text", "status"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2,}}\n</tool_call>', "invalid_json"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2', "unclosed_block"),
        ('<tool_call>\n{"arguments": {"a": 2}}\n</tool_call>', "missing_name"),
        ('<tool_call>\n{"name": 5, "arguments": {"a": 2}}\n</tool_call>', "invalid_name"),
        ('<tool_call>\n{"name": "\\ud83d", "arguments": {"a": 2}}\n</tool_call>', "invalid_name"),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": ' + '{"c": ' * 3000 + "1" + "}" * 3002 + "\n</tool_call>", "unreadable"),
    ],
)
def test_a_malformed_call_has_its_text_and_its_status(chat: ChatTokens, text: str, status: str) -> None:
    [call] = chat.parse(drawn(chat, f"Well.\n{text}<|im_end|>"), [TOOL]).calls
    assert not call.ok and call.status == status and '"a": 2' in call.text


def test_reasoning_is_told_apart(chat: ChatTokens) -> None:
    parsed = chat.parse(drawn(chat, "<think>\ntwo and two\n</think>\n\n4<|im_end|>"), [])
    assert (parsed.content.strip(), parsed.reasoning.strip(), parsed.calls) == ("4", "two and two", ())


def test_a_prompt_is_what_the_template_writes(chat: ChatTokens) -> None:
    prompt = chat.render([{"role": "user", "content": "say 4"}], [])
    assert chat.tokenizer.decode(prompt, skip_special_tokens=False) == "<|im_start|>user\nsay 4<|im_end|>\n<|im_start|>assistant\n"


def deepseek(path: Path, template: str) -> ChatTokens:
    settings = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    return ChatTokens(write_qwen3_tokenizer(path, template, call_templates.DEEPSEEK_TOKENS, settings), {})


def called(*arguments: object) -> list[dict[str, object]]:
    calls = [{**CALL, "id": f"c{n}", "function": {"name": "add", "arguments": one}} for n, one in enumerate(arguments, 1)]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "4"} for call in calls]
    return [*ASK, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


@pytest.mark.parametrize(
    ("template", "family"), [("DEEPSEEK_V3", "deepseek-v3"), ("DEEPSEEK_R1", "deepseek-r1"), ("FIRST_DEEPSEEK", "default")]
)
def test_a_conversation_of_deepseeks_continues_after_a_tool_call(template: str, family: str, tmp_path: Path) -> None:
    """Their templates concatenate arguments as text; the first ones show calls only where the content is null."""
    chat = deepseek(tmp_path, getattr(call_templates, template))
    assert chat.family == family
    text = '{"b":2, "a": 2.0}'
    for arguments in ((text,), (text, '{"a": 2')):
        prompt = chat.text(chat.render(called(*arguments), [TOOL]))
        assert all(f"add\n```json\n{one}\n```" in prompt for one in arguments)
        messages = [dict(message, content=message["content"] or None) for message in called(*arguments)]
        assert prompt == chat.tokenizer.render(messages, {"tools": [TOOL]}), "as the template writes it"
    written = f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{text}\n```<｜tool▁call▁end｜>"
    turn = drawn(chat, f"{written}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>")
    if family == "deepseek-v3":  # R1's template drops what was thought
        [call] = chat.parse(turn, [TOOL]).calls
        assert call.ok and call.arguments == {"b": 2, "a": 2.0}
        bridged = chat.bridge(turn, [RESULT], [TOOL])
        assert bridged is not None and bridged[: len(turn.tokens)].tolist() == turn.tokens.tolist()
        assert chat.bridge(turn, [RESULT, RESULT], [TOOL]) is None, "its renderer separates results otherwise than the template"


@table("template", ["QWEN_2_5", "QWEN_3", "HERMES_3", "LLAMA_3_1", "GLM_4_5", "KIMI_K2", "MISTRAL", "STRINGIFIED"])
@table("arguments", ['{"a": 1', "", "null", "[1]", '"text"', '{"a": "\\ud800"}', '{"a":' * 5000 + "1" + "}" * 5000])
def test_no_arguments_of_a_call_end_a_conversation(template: str, arguments: str, tmp_path: Path) -> None:
    chat = ChatTokens(write_qwen3_tokenizer(tmp_path, getattr(call_templates, template)), {})
    assert len(chat.render(called(arguments), [TOOL]))


def test_a_familys_renderer_loses_no_malformed_arguments(chat: ChatTokens, tmp_path: Path) -> None:
    assert chat.family == "qwen3"
    assert '"arguments": {"a": 1\n' in chat.text(chat.render(called('{"a": 1\n'), [TOOL]))
    assert '"arguments": {}}' in chat.text(chat.render(called(""), [TOOL]))
    iterating = TEMPLATE.replace("(call.function.arguments | tojson) + '}", "(dict(call.function.arguments.items()) | tojson) + '}")
    other = ChatTokens(write_qwen3_tokenizer(tmp_path, iterating), {})
    assert other.family == "qwen3"
    assert '"arguments": {"arguments": "{\\"a\\": 1"}}' in other.text(other.render(called('{"a": 1'), [TOOL]))


def test_a_template_that_refuses_a_role_says_so_itself(tmp_path: Path) -> None:
    gemma = ChatTokens(write_qwen3_tokenizer(tmp_path, call_templates.GEMMA_2), {})
    assert gemma.family == "default" and len(gemma.render(ASK, []))
    for messages, why in ((called("{}"), "roles must alternate"), ([{"role": "system", "content": "x"}, *ASK], "System role")):
        with pytest.raises(TurnRefused, match=why):
            gemma.render(messages, [])


def test_it_is_known_whether_the_model_is_told_of_tools(chat: ChatTokens, tmp_path: Path) -> None:
    assert chat.shows_tools
    plain = "{% for message in messages %}{{ '<|im_start|>' + message.content }}{% endfor %}"
    assert not ChatTokens(write_qwen3_tokenizer(tmp_path / "plain", plain), {}).shows_tools


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    bare = ChatTokens(write_qwen3_tokenizer(tmp_path / "bare", None), {})
    assert not bare.shows_tools
    with pytest.raises(TurnRefused, match="no chat template"):
        bare.render(ASK, [])


@table(
    ("arguments", "status"),
    [
        ({"a": 1}, "ok"),
        ('{"a": 1}', "ok"),
        (None, "ok"),
        ({"a": float("inf")}, "invalid_arguments"),
        ('{"a": NaN}', "invalid_arguments"),
        ("[1]", "invalid_arguments"),
        ("add 1", "invalid_arguments"),
        ({"a": DEEP}, "invalid_arguments"),
        ({"a": 10**30}, "ok"),
        ('{"a": "\\ud83d"}', "invalid_arguments"),
        ({"\ud83d": 1}, "invalid_arguments"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "invalid_arguments"),
    ],
)
def test_a_calls_arguments_are_an_object_that_every_format_can_carry(arguments: object, status: str) -> None:
    assert call_status("ok", "add", arguments) == status
    assert call_status("unclosed_block", "add", arguments) == "unclosed_block"


def test_the_texts_that_are_remembered_have_a_bound(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_qwen3_tokenizer(tmp_path))
    encoded = EncodedTexts(tokenizer, most=10)
    for text in ("abcd", "efgh", "abcd", "ijkl"):
        np.testing.assert_array_equal(encoded.of(text), tokenizer.encode(text))
    assert encoded.characters == 8
    again = encoded.of("abcd")
    assert again is encoded.of("abcd"), "the one that was asked for least lately was forgotten"
    np.testing.assert_array_equal(encoded.of("a text of more"), tokenizer.encode("a text of more"))
    assert encoded.characters == 0


def test_threads_that_make_one_text_into_tokens_at_once_count_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, both = Tokenizer(write_qwen3_tokenizer(tmp_path)), threading.Barrier(2)
    encode, encoded = tokenizer.encode, EncodedTexts(tokenizer, most=10)
    monkeypatch.setattr(tokenizer, "encode", lambda text: (encode(text), both.wait(30))[0])
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(encoded.of, ["abcd", "abcd"])
    assert one.tolist() == other.tolist() and encoded.characters == 4


SUM = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]}
ANSWER, ADDED = '{"sum": 4}', '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
JSON, ANY_CALL, ONE = json_constraint("f", SUM), call_constraint("t", [], [TOOL], required=True), single_call("p")


@table(
    ("constraints", "tools", "taken", "refused"),
    [
        ([JSON], [], [ANSWER, f"<think>\nlong\n</think>\n\n{ANSWER}"], ["4", f"{ANSWER} so", '{"sum": "4"}']),
        ([JSON], [TOOL], [ANSWER, ADDED], ["Four."]),
        ([ANY_CALL], [TOOL], [ADDED, f"{ADDED}\n{ADDED}", f"<think>\n</think>{ADDED}"], ["Four.", ADDED.replace("add", "sub")]),
        ([ANY_CALL, ONE], [TOOL], [ADDED], [f"{ADDED}\n{ADDED}"]),
        ([ONE], [TOOL], ["Four.", f"So: {ADDED}"], [f"{ADDED}\n{ADDED}"]),
    ],
)
def test_a_grammar_takes_what_the_constraints_allow(chat: ChatTokens, constraints: list, tools: list, taken: list, refused: list) -> None:
    """What xgrammar, SGLang's own, takes of whole answers."""
    asked = ChatTurn(request_id="r", model=None, messages=ASK, tools=tools, constraints=tuple(constraints))
    tag = chat.grammar(asked, chat.render(ASK, tools))
    compiled = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([])).compile_structural_tag(tag)

    def whole(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_completed()

    assert [text for text in taken if not whole(text)] == []
    assert [text for text in refused if whole(text)] == []
    with pytest.raises(TurnRefused, match=f"{constraints[0].field}: an answer that the request begins"):
        chat.grammar(replace(asked, messages=[*ASK, {"role": "assistant", "content": "{"}]), chat.render(ASK, tools))


def test_the_settings_of_many_sessions_at_once_are_kept(chat: ChatTokens) -> None:
    forms = [chat.varied({"date": str(day)}) for day in range(20)]
    assert all(chat.varied({"date": str(day)}) is form for day, form in enumerate(forms))
