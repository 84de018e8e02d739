"""Verifiers: what they are given, what counts as the right answer, and that docs/math-rewards.md says it."""

import re
from dataclasses import replace
from pathlib import Path

import math_verify
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.remote_rewards import prompt_text
from shared.config.reward_section import RewardSection
from shared.data.tokenizer import Tokenizer
from shared.hub import hub_client
from shared.rewards import names
from shared.rewards.reference import Reference
from shared.rewards.verifiers import READ_LABEL, VERIFIERS, verify
from shared.schema.sample import Sample
from tests.support.run_config import run_config
from tests.support.tables import table
from tests.support.valid_messages import example


def test_every_configurable_verifier_exists() -> None:
    for name in names.VERIFIERS:
        assert RewardSection(rm_type=name).rm_type == name
    assert VERIFIERS.keys() == names.QUEUES.keys()
    assert READ_LABEL.keys() <= VERIFIERS.keys()


@table(
    ("response", "label", "reward"),
    [("42", "42", 1.0), (" 42\n", "42 ", 1.0), ("42.0", "42", 0.0), ("the 42", "42", 0.0), ("", "42", 0.0), ("Yes", "yes", 0.0)],
)
def test_exact_match(response: str, label: str, reward: float) -> None:
    assert verify("exact", response, Reference(label)) == reward


@table(
    ("response", "label", "reward"),
    [
        ("42", "42", 1.0),
        (" 42\n", "42", 1.0),
        ("42.0", "42", 1.0),
        ("-7", "-7", 1.0),
        ("+7", "7", 1.0),
        ("007", "7", 1.0),
        ("0.5", "1/2", 1.0),
        ("41", "42", 0.0),
        ("4 2", "42", 0.0),
        ("", "42", 0.0),
        ("no idea", "42", 0.0),
        ("The answer is \\boxed{42}.", "42", 1.0),
        ("First \\boxed{41}, no: \\boxed{42}", "42", 1.0),
        ("So \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{x^2+2x+1}", "(x+1)^2", 1.0),
        ("\\boxed{x^2+2x}", "(x+1)^2", 0.0),
        ("\\boxed{\\{1, 2\\}}", "\\{2, 1\\}", 1.0),
        ("\\boxed{", "42", 0.0),
        ("\\boxed{42} and then \\boxed{", "42", 1.0),
        ("\\boxed{4\\text{ or }{\\boxed{42}}}, so \\boxed{42}", "42", 1.0),
        ("} \\boxed{\\{1, 2\\}} and {1}", "\\{2, 1\\}", 1.0),
    ],
)
def test_mathematical_equality(response: str, label: str, reward: float) -> None:
    assert verify("math_verify", response, Reference(label)) == reward


PIECES = ["so", "the answer is", "or", "e", "x", *"0123456789", " ", " ", "\n", *"-+*.:,()=%!^/"]


@given(st.lists(st.sampled_from(PIECES), max_size=7).map("".join), st.integers(-20, 20))
def test_the_short_way_for_plain_numbers_agrees_with_the_library(response: str, label: int) -> None:
    found = math_verify.parse(response)
    if found and not response.lstrip().startswith("(") and not re.search(r"\de[-+]?\d", response):  # which reads no exponents
        assert verify("math_verify", response, Reference(str(label))) == float(math_verify.verify(math_verify.parse(f"${label}$"), found))


@table(
    ("response", "label", "reward"),
    [
        ("(12 08 11)1182", "1182", 0.0),
        ("(12 08 11) 1182.", "1182", 1.0),
        ("3+4", "4", 0.0),
        ("3+4", "7", 1.0),
        ("5-7", "7", 0.0),
        ("1,042", "42", 0.0),
        ("1,042", "1042", 1.0),
    ],
)
def test_an_expression_counts_for_its_value(response: str, label: str, reward: float) -> None:
    assert verify("math_verify", response, Reference(label)) == reward


@given(st.integers(-(10**30), 10**30), st.integers(-(10**30), 10**30))
def test_plain_numbers_are_compared_exactly(left: int, right: int) -> None:
    assert verify("math_verify", str(left), Reference(str(right))) == float(left == right)
    assert verify("math_verify", f"{left}.50", Reference(f"{left}.5")) == 1.0


# --- docs/math-rewards.md says what the math verifier reads: each row of its tables is run through it

PAGE = (Path(__file__).parents[3] / "docs" / "math-rewards.md").read_text()


def rows(head: str) -> list[list[str]]:
    """The cells of a table, without the signs for code and with line breaks."""
    [table] = re.findall(rf"^{re.escape(head)}\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()]
    return [[cell.strip("` |").replace(" ⏎ ", "\n") for cell in cells] for cells in lines]


ANSWERS = rows("| response | label | reward |")
LABELS = rows("| label | is read as | response | reward |")
REFUSED = rows("| label | words |")


@table(
    ("response", "label", "reward"),
    [(response, label, float(reward)) for response, label, reward in ANSWERS]
    + [(response, label, float(reward)) for label, _, response, reward in LABELS],
)
def test_what_is_read_earns_what_the_page_says(response: str, label: str, reward: float) -> None:
    assert verify("math_verify", response, Reference(label)) == reward


@table(("label", "words"), REFUSED)
def test_what_cannot_be_compared_is_refused_in_words(label: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        verify("math_verify", "42", Reference(label))


def test_an_empty_label_is_refused() -> None:
    with pytest.raises(ValueError, match="is read in the label ''"):
        verify("math_verify", "", Reference(""))


# --- a remote reward gets prompts as slime has them: as they stand in the file, or rendered by the chat template

MESSAGES = [{"role": "user", "content": "1+1="}]


def test_a_prompt_is_rendered_where_the_run_does_so(tmp_path: Path, tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    rendered = tokenizer.render(MESSAGES, {})
    sample = example(Sample, prompt=tokenizer.encode(rendered), text="2", prompt_text="1+1=")
    model = {"hf_checkpoint": str(tiny_model)}
    as_rendered = prompt_text(run_config(tmp_path, model=model, data={"apply_chat_template": True}))
    assert as_rendered(sample) == as_rendered(replace(sample, prompt_text=MESSAGES)) == rendered
    assert prompt_text(run_config(tmp_path, model=model))(sample) == "1+1="
    held_out = replace(sample, group="eval.other.0.0")
    for run in (True, False):
        sets = [{"name": "other", "path": "p", "apply_chat_template": not run}]
        text = prompt_text(run_config(tmp_path, model=model, data={"apply_chat_template": run}, eval={"sets": sets}))
        assert (text(sample), text(held_out)) == ((rendered, "1+1=") if run else ("1+1=", rendered))


def test_a_model_of_the_hub_renders_them_too(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config of a run names it; its tokenizer is fetched, and no weights."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(hub_client, "model_directory", lambda hub, name, weights: Path("none") if weights else tiny_model)
    config = run_config(tmp_path, model={"hf_checkpoint": f"hf:Qwen/Qwen3-0.6B@main={'0' * 40}"}, data={"apply_chat_template": True})
    sample = example(Sample, prompt=Tokenizer(tiny_model).encode("1+1="), text="2", prompt_text=MESSAGES)
    assert prompt_text(config)(sample) == "1+1="
