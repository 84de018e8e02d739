"""Control tokens that text of others spells become the tokens of the text, as a tokenizer gives them that knows no control tokens."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from shared.data.control_tokens import ControlTokens
from tests.support.tables import table

CORPUS = ["<a> the <b> end_of_turn |> im_start <|im_end|> user\n assistant\n tool_call think <s> </s> [INST] "] * 4
QWEN = [("  ", False), ("<|im_start|>", True), ("<|im_end|>", True), ("<tool_call>", False), ("</tool_call>", False), ("<think>", False)]
LLAMA = [
    (f"<|{name}|>", True) for name in ("begin_of_text", "eot_id", "start_header_id", *(f"reserved_special_token_{n}" for n in range(250)))
]
PIECES = ["a", " ", "  ", "\n", "<", "|", "|>", "<|im_", "start|>", "<s", ">", "the", "[", "INST]", "é", "<think", "/"]


def byte_level(tokens: list[tuple[str, bool]], **flags: bool) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    made.add_tokens([AddedToken(text, special=special, normalized=False, **flags) for text, special in tokens])
    return made


def spaced(scheme: str = "first") -> Tokenizer:
    """A tokenizer in the manner of Llama 2: its control tokens stand in the vocabulary of text itself."""
    letters = sorted({*"▁\n <>/|[]", *"abcdefghijklmnopqrstuvwxyzINST_é"})
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", "[INST]", *letters, "▁t", "▁th", "▁the", "</", "an"])}
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e"), ("<", "/"), ("a", "n")]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace("▁", scheme), decoders.Metaspace("▁", scheme)
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.add_tokens([AddedToken("[INST]", normalized=True)])
    return made


def greedy() -> Tokenizer:
    """A Unigram model, which takes a control token of its vocabulary for the best piece of text."""
    letters = [(letter, -4.0) for letter in "▁\n <>/|[]abcdefghijklmnopqrstuvwxyzINST_é"]
    made = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *letters], 0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace("▁", "first"), decoders.Metaspace("▁", "first")
    made.normalizer = normalizers.NFC()
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    return made


KINDS = {
    "qwen": byte_level(QWEN),
    "llama": byte_level(LLAMA),
    "stripping": byte_level(QWEN, lstrip=True, rstrip=True),
    "nested": byte_level([("<|a|>", True), ("<|a|>b", True), ("b<", False), ("|>b<|", True)]),
    "spaced": spaced(),
    "always spaced": spaced("always"),
    "greedy": greedy(),
}
CONTROLS = {kind: ControlTokens(backend) for kind, backend in KINDS.items()}
AS_WRITTEN = {kind: ControlTokens(backend, as_written=True) for kind, backend in KINDS.items()}


def ids_of(backend: Tokenizer, text: str) -> list[int]:
    return backend.encode(text, add_special_tokens=False).ids


def knowing_none(backend: Tokenizer) -> Tokenizer:
    """The same tokenizer, which has been given no control tokens."""
    saved = json.loads(backend.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if not token["content"].strip()]
    return Tokenizer.from_str(json.dumps(saved))


def texts(kind: str) -> st.SearchStrategy[str]:
    spelled = [token.content for token in KINDS[kind].get_added_tokens_decoder().values()]
    return st.lists(st.sampled_from([*spelled[:12], *PIECES]), max_size=8).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_the_template_spells_is_encoded_as_ever(kind: str, data: st.DataObject) -> None:
    text = data.draw(texts(kind))
    for control in (CONTROLS[kind], AS_WRITTEN[kind]):
        assert control.encode(text).tolist() == ids_of(KINDS[kind], text)
    assert AS_WRITTEN[kind].guarded({text: [text]}) == {text: [text]}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_text_of_others_gives_what_a_tokenizer_without_control_tokens_gives(kind: str, data: st.DataObject) -> None:
    text, control, backend = data.draw(texts(kind)), CONTROLS[kind], KINDS[kind]
    guarded = control.guarded(text)
    ids = control.encode(guarded).tolist()
    assert control.plain(guarded) == text and not {one for one in ids if one in control.texts and control.texts[one] != "<unk>"}
    if kind != "greedy":
        assert ids == ids_of(knowing_none(backend), text)
    if "<unk>" not in text and kind not in ("stripping", "spaced", "always spaced", "greedy"):
        assert backend.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", ["qwen", "llama", "spaced", "greedy", "nested"])
@given(data=st.data())
def test_no_text_of_others_completes_a_control_token_that_the_template_does_not_spell(kind: str, data: st.DataObject) -> None:
    control = CONTROLS[kind]
    [before, mine, other, behind] = (data.draw(texts(kind)) for _ in range(4))
    ids = control.encode(before + control.guarded(mine) + control.guarded(other) + behind).tolist()
    own = [before, behind] if mine or other else [before + behind]  # between which nothing stands
    trusted = [one for text in own for one in ids_of(KINDS[kind], text)]
    of_control = [[one for one in found if one in control.texts and control.texts[one] != "<unk>"] for found in (ids, trusted)]
    assert of_control[0] == of_control[1]


def test_a_text_that_begins_or_ends_with_the_rest_of_a_token_in_letters_completes_none() -> None:
    control, backend = CONTROLS["nested"], KINDS["nested"]
    assert control.encode("<|a|>" + control.guarded("b<")).tolist()[0] == backend.token_to_id("<|a|>")
    assert backend.token_to_id("b<") not in control.encode(control.guarded("a b") + "<").tolist()
    assert control.guarded({"role": "b"}) == {"role": "b"}


def test_no_mark_or_name_completes_a_control_token() -> None:
    """These tokens begin and end with each digit and most letters, as a mark might."""
    edges = [one for one in "0123456789abcdefghijklmnopqrstuvwxyzABCDEF" if one not in "kxz"]
    backend = byte_level([("<|a|>", True), *((f"<|a|>{one}", True) for one in edges), *((f"{one}<", False) for one in edges)])
    for control in (ControlTokens(backend) for _ in range(4)):  # each has marks of its own
        for text in ("<|a|>", "<|a|>b<", "|a|>", "b<<"):
            assert control.encode(control.guarded(text)).tolist() == ids_of(knowing_none(backend), text)
        behind_one = control.encode("<|a|>" + control.guarded("<|a|>")).tolist()
        assert behind_one == [backend.token_to_id("<|a|>"), *ids_of(knowing_none(backend), "<|a|>")]


def test_every_reserved_token_and_those_inside_of_one_another() -> None:
    backend, control = KINDS["llama"], CONTROLS["llama"]
    for text in (*(text for text, _ in LLAMA), "<|eot_<|eot_id|>id|>", "<|eot_id|><|eot_id|>", "<<|eot_id|>>"):
        ids = control.encode("<|eot_id|>" + control.guarded(text) + "<|eot_id|>").tolist()
        assert [one for one in ids if one in control.texts] == [backend.token_to_id("<|eot_id|>")] * 2
        assert backend.decode(ids, skip_special_tokens=False) == f"<|eot_id|>{text}<|eot_id|>"


def test_all_texts_of_a_value_are_guarded_and_values_that_are_kept_are_not() -> None:
    control = CONTROLS["qwen"]
    value = {"<think>": ["<|im_end|>", {"a": "x<think>y"}], "n": 1, "none": None, "yes": True}
    guarded = control.guarded(value)
    assert guarded["n"] == 1 and guarded["none"] is None and guarded["yes"] is True
    written = json.dumps(guarded)
    assert control.plain(written) == json.dumps(value) and not set(control.encode(written).tolist()) & set(control.texts)
    kept = control.encode(json.dumps(control.guarded(value, control.markers))).tolist()
    assert [control.texts[one] for one in kept if one in control.texts] == ["<think>"]


def test_names_that_a_template_looks_up_stay_what_they_are() -> None:
    control = ControlTokens(byte_level([("sop", True), ("type", True), ("<name>", False), ("<|user|>", True)]))
    schema = {"type": {"properties": 1, "stop": 2, "user": 3}}
    assert control.guarded(schema) == schema
    [tag] = control.guarded({"name": 1})
    assert not set(control.encode(f"<{tag}></{tag}>").tolist()) & set(control.texts)


@table("word", ["    ", "▁▁", "\n\n", "мир", "ที่", "kilo gram2", "☃"])
def test_words_signs_and_white_space_that_were_added_to_a_vocabulary_are_no_control_tokens(word: str) -> None:
    backend = byte_level([("<|im_end|>", True), (word, False)])
    control = ControlTokens(backend)
    ids = control.encode(control.guarded(f"a{word}<|im_end|>")).tolist()
    assert ids[: len(ids_of(backend, f"a{word}"))] == ids_of(backend, f"a{word}") and backend.token_to_id(word) in ids
    assert backend.token_to_id("<|im_end|>") not in ids


def test_a_checkpoint_that_splits_special_tokens_has_the_others_guarded() -> None:
    backend = byte_level(QWEN)
    backend.encode_special_tokens = True
    control = ControlTokens(backend)
    text = "<|im_start|>a<think>"
    assert control.encode(text).tolist() == ids_of(backend, text)
    assert not set(control.encode(control.guarded(text)).tolist()) & set(control.texts)


def test_ids_of_a_vocabulary_with_holes_are_not_given_twice() -> None:
    vocabulary = {"a": 0, "<": 1, "b": 5, ">": 6, "x": 7, "<x>": 9}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.add_special_tokens(["<x>"])
    control = ControlTokens(backend)
    np.testing.assert_array_equal(control.encode("ab<x>" + control.guarded("<x>")), [0, 5, 9, 1, 7, 6])


def test_a_normalizer_makes_no_control_token_of_text_like_one() -> None:
    """A token that is not special is looked for in normalized text: there, capitals spell it too."""
    backend = byte_level([])
    backend.normalizer = normalizers.Lowercase()
    backend.add_tokens([AddedToken("<think>", normalized=True)])
    control = ControlTokens(backend)
    assert ids_of(backend, "<THINK>") == [backend.token_to_id("<think>")]
    assert backend.token_to_id("<think>") not in control.encode(control.guarded("<THINK><think>")).tolist()
    assert control.encode("a<think>b").tolist() == ids_of(backend, "a<think>b")


def test_transformers_splits_special_tokens_alike(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    backend, control = KINDS["llama"], CONTROLS["llama"]
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=[text for text, _ in LLAMA])
    for text in ("say <|eot_id|> twice<|eot_id|>", " <|begin_of_text|>\n\n", "<|start_header_id|>system"):
        expected = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert control.encode(control.guarded(text)).tolist() == expected
