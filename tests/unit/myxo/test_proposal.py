"""First configs: what rows are taken for, and layouts that fit."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myxo.commands.init import GpuLayout, guessed, proposed
from shared.model.families import read_architecture
from shared.runtime.errors import ConfigError
from tests.support.tables import table

GIB = 1 << 30
CHAT = [{"role": "user", "content": "1+1="}]


@table(
    ("row", "expected"),
    [
        ({"prompt": "1+1=", "label": "2"}, ("prompt", "label", False, "math_verify")),
        ({"question": "How many?", "answer": "He had 3, so 3 + 4 = <<3+4=7>>7\n#### 7"}, ("question", "answer", False, "math_verify")),
        ({"problem": "Solve.", "solution": r"\frac{3}{4}"}, ("problem", "solution", False, "math_verify")),
        ({"messages": CHAT, "ground_truth": "B"}, ("messages", "ground_truth", True, "exact")),
        ({"prompt": "Capital of France?", "label": "Paris"}, ("prompt", "label", False, "exact")),
        ({"prompt": "Write f.", "label": "assert f(1) == 2"}, ("prompt", "label", False, "unit_tests")),
        ({"prompt": "Add.", "label": {"inputs": ["1 2"], "outputs": ["3"]}}, ("prompt", "label", False, "unit_tests")),
        ({"id": 7, "text": "1+1=", "label": 2}, ("text", "label", False, "math_verify")),
    ],
)
def test_what_rows_are_taken_for(row: dict[str, Any], expected: tuple[str, str, bool, str]) -> None:
    found = guessed([row] * 3, "data.jsonl")
    assert (found.input_key, found.label_key, found.chat, found.rm_type) == expected
    assert found.reason


@table(
    ("rows", "field"),
    [
        ([{"a": "x", "b": "y"}], "DATA"),
        ([{"prompt": "x"}], "--rm-type"),
        ([{"prompt": "Tell a story.", "label": "Once upon a time there was " * 9}], "--rm-type"),
        ([{"prompt": "x", "label": "1"}, {"question": "x", "label": "1"}], "DATA"),
        ([{"prompt": "", "label": "1"}], "DATA"),
    ],
)
def test_what_cannot_be_guessed_is_asked_for(rows: list[dict[str, Any]], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        guessed(rows, "data.jsonl")
    assert caught.value.field == field


def test_a_named_reward_is_taken() -> None:
    assert guessed([{"prompt": "Tell a story."}], "data.jsonl", "dapo").rm_type == "dapo"


@pytest.fixture(scope="module")
def architecture(tiny_model: Any) -> Any:
    return replace(read_architecture(tiny_model), num_key_value_heads=8)


def test_layouts_of_known_sizes(architecture: Any) -> None:
    def on(gpus: int, billions: float) -> GpuLayout | None:
        return proposed(architecture, int(billions * 1e9), gpus, 80 * GIB)

    assert on(2, 0.6) == GpuLayout(1, 1, 1, 1)
    assert on(8, 4) == GpuLayout(4, 1, 4, 1)
    assert on(8, 8) == GpuLayout(4, 2, 4, 1)
    assert on(1, 2) == GpuLayout(1, 1, 1, 1, colocate=True)
    assert on(2, 4) == GpuLayout(2, 1, 2, 1, colocate=True)
    assert on(8, 70) is None
    assert proposed(replace(architecture, num_key_value_heads=1), int(8e9), 4, 80 * GIB) is None


@given(gpus=st.integers(1, 16), billions=st.floats(0.1, 80), memory=st.sampled_from([16, 24, 40, 80, 141]))
def test_every_proposed_layout_fits(architecture: Any, gpus: int, billions: float, memory: int) -> None:
    parameters = int(billions * 1e9)
    found = proposed(architecture, parameters, gpus, memory * GIB)
    if found is None:
        return
    assert found.train_gpus % found.tensor == 0
    assert architecture.num_key_value_heads % found.tensor == architecture.num_key_value_heads % found.engine_gpus == 0
    used = found.engines * found.engine_gpus + (0 if found.colocate else found.train_gpus)
    assert 1 <= used <= min(gpus, 8)
    assert found.engines >= 1
    assert parameters * 2 / found.engine_gpus < memory * GIB
    assert parameters * (6 / found.tensor + 12 / found.train_gpus) < memory * GIB
