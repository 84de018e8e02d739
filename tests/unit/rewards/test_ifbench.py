"""``ifbench``: every instruction has to be kept. Two instructions in IFBench's form stand in for its package, which has dozens."""

import sys
from types import ModuleType
from typing import Any

import pytest

from shared.rewards.reference import Reference, label_problem
from shared.rewards.text_rewards import compute_ifbench_reward, instructions
from shared.rewards.verifiers import read_label


class Words:
    """At least ``least`` words, 2 by default."""

    def __init__(self, name: str) -> None:
        self.name, self.least = name, 2

    def build_description(self, *, least: int = 2) -> str:
        self.least = least
        return f"at least {least} words"

    def get_instruction_args(self) -> dict[str, Any] | None:
        return {"least": self.least}

    def check_following(self, text: str) -> bool:
        return len(text.split()) >= self.least


class RepeatsPrompt(Words):
    """Begins with the prompt."""

    def build_description(self, *, prompt: str | None = None) -> str:
        self.prompt = prompt
        return "repeat the prompt"

    def get_instruction_args(self) -> dict[str, Any] | None:
        return {"prompt": self.prompt}

    def check_following(self, text: str) -> bool:
        return bool(self.prompt) and text.startswith(str(self.prompt))


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("ifbench.instructions_registry")
    module.INSTRUCTION_DICT = {"count:words": Words, "repeat:prompt": RepeatsPrompt}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ifbench", ModuleType("ifbench"))
    monkeypatch.setitem(sys.modules, "ifbench.instructions_registry", module)


@pytest.mark.parametrize(
    ("names", "kwargs", "response", "reward"),
    [
        (["count:words"], [{"least": 3}], "one two three", 1.0),
        (["count:words"], [{"least": 3}], "one two", 0.0),
        (["count:words"], [{"least": None}], "one two", 1.0),
        (["count:words"], None, "one two", 1.0),
        (["count:words"] * 2, {"least": 3}, "one two three", 1.0),
        (["count:words"] * 2, [{}, {"least": 3}], "one two", 0.0),
        (["count:words"] * 3, [{"least": 1}], "one", 1.0),
        (["count:words"], [{"least": 1}, {"least": 9}], "one", 1.0),
        (["count:words"], [{"least": 0}], "  ", 0.0),
        (["repeat:prompt", " count:words ", None], None, "Say it. Yes.", 1.0),
        (["repeat:prompt", "count:words"], None, "Yes. Say it.", 0.0),
        ([], None, "anything", 0.0),
        (None, None, "anything", 0.0),
    ],
)
def test_every_instruction_has_to_be_kept(names: Any, kwargs: Any, response: str, reward: float) -> None:
    metadata = {"instruction_id_list": names, "kwargs": kwargs, "prompt_text": "Say it."}
    assert compute_ifbench_reward(response, None, metadata) == reward


def test_without_response_or_metadata_there_is_no_reward() -> None:
    assert compute_ifbench_reward(None, None, {"instruction_id_list": ["count:words"]}) == 0.0
    assert compute_ifbench_reward("one two", None, None) == 0.0
    assert instructions({"instruction_id_list": ["a", "", None, " b "]}) == ["a", "b"]


def test_an_instruction_that_there_is_not_is_named() -> None:
    metadata = {"instruction_id_list": ["count:words", "count:wordz"]}
    with pytest.raises(ValueError, match="names 'count:wordz'; did you mean count:words?"):
        read_label("ifbench", Reference(None, metadata=metadata))
    with pytest.raises(KeyError, match="count:wordz"):
        compute_ifbench_reward("one two", None, metadata)


def test_a_prompt_that_nothing_could_be_right_for_is_refused() -> None:
    assert "metadata.instruction_id_list" in str(label_problem("ifbench", Reference("a")))
    assert label_problem("boxed_ifbench", Reference(None, metadata={"instruction_id_list": ["count:words"]})) is None
    assert "correct_letter" in str(label_problem("gpqa", Reference(None, metadata={"choices": ["a", "b"]})))
    assert label_problem("gpqa", Reference(None, metadata={"correct_letter": "B"})) is None
    assert label_problem("gpqa", Reference("B")) is None
