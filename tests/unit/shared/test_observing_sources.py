"""A source in its own process that hears results: what it raises, and where it hangs or dies over them, costs those results alone."""

import re
from pathlib import Path

import pytest

from shared.data import data_source, source_process
from shared.data.data_source import DrawnPrompts, GroupResult, ResultLog, merged
from shared.data.source_process import opened
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from tests.support import adaptive_source
from tests.support.run_config import run_config
from tests.unit.shared.test_data_source import closed_sources, forked_python

__all__ = ["closed_sources", "forked_python"]

BATCHES = 5


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def admitted(prompts: DrawnPrompts, batches: int = BATCHES) -> None:
    """Two groups a batch: of the first rewards (1, 0) and (0, 0) come back, the second is dropped, and so on; then the next is admitted."""
    for first in range(0, 2 * batches, 2):
        prompts.results.admit(first)
        prompts.results.add([GroupResult(first, "trained", (1.0, 0.0)), GroupResult(first + 1, "dropped", (0.0, 0.0), "filtered: same")])


def heard(prompts: DrawnPrompts) -> list[int]:
    return [prompts.at(2 * batch).metadata["heard"] for batch in range(BATCHES)]


def opened_prompts(directory: Path, tokenizer: Tokenizer, name: str, report: list[ConfigError]) -> DrawnPrompts:
    config = run_config(directory, data={"prompt_data": None, "data_source": f"tests.support.adaptive_source:{name}"})
    prompts = DrawnPrompts(config, tokenizer, report.append)
    admitted(prompts)
    return prompts


def test_a_source_hears_what_had_ended_before_its_prompt_was_admitted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    report: list[ConfigError] = []
    assert heard(opened_prompts(tmp_path, tokenizer, "Hearing", report)) == [0, 2, 4, 6, 8]
    assert report == []


def test_what_observe_raises_costs_those_results(tmp_path: Path, tokenizer: Tokenizer) -> None:
    report: list[ConfigError] = []
    prompts = opened_prompts(tmp_path, tokenizer, "Raising", report)
    assert heard(prompts) == [0, 2, 2, 4, 6]
    [error] = report
    assert error.field == "data.data_source" and re.search(
        r"observe, of 2 results, raised tests/support/adaptive_source.py:\d+, in observe: ValueError: I will not hear this", str(error)
    )
    assert len({prompts.at(number).metadata["process"] for number in range(2 * BATCHES)}) == 1, "the process continues"


def test_a_source_that_hangs_over_results_goes_on_without_them(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_process, "OBSERVE_SECONDS", 1.0)
    report: list[ConfigError] = []
    prompts = opened_prompts(tmp_path, tokenizer, "Hanging", report)
    assert heard(prompts) == [0, 0, 2, 4, 6]
    [error] = report
    assert "observe, of 2 results: it did not answer within 1 s; its process was killed; it continues without them" in str(error)
    assert len({prompts.at(number).metadata["process"] for number in range(2 * BATCHES)}) == 2
    again = opened_prompts(tmp_path, tokenizer, "Hanging", report)
    again.results.admit(2 * BATCHES)
    assert again.at(2 * BATCHES).metadata["heard"] == 8 and len(report) == 1, "they are not told again"


def test_a_source_that_dies_of_results_again_and_again_is_told_no_more(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_source, "MOST_DEATHS", 2)
    report: list[ConfigError] = []
    prompts = opened_prompts(tmp_path, tokenizer, "Deaf", report)
    assert heard(prompts) == [0] * BATCHES
    first, second = map(str, report)
    assert "its process ended" in first and first.endswith("continues without them")
    assert second.endswith("it is told no more until the buffer starts anew")
    assert prompts._drawn.last["untold"] == [[0, 8]], "one range, however many calls it was"


def test_observe_is_a_plain_method(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"observe of its Async is no plain method observe\(results\)"):
        opened(adaptive_source.Async, run_config(tmp_path))


def test_a_log_forgets_what_a_state_holds() -> None:
    log = ResultLog()
    results = [GroupResult(number, "dead", (), "x") for number in range(6)]
    log.forget(2)
    log.add(results[:1])
    log.add(results[1:4])
    log.admit(9)
    assert (len(log), log.before(8), log.before(9), log.before(99)) == (4, 0, 4, 4)
    assert log.between(2, 4) == results[2:4]
    log.forget(3)
    log.add(results[4:])
    assert log.between(3, 6) == results[3:]
    with pytest.raises(ValueError, match="those before 3 are forgotten"):
        log.between(2, 4)


def test_ranges_that_touch_are_one() -> None:
    assert merged([[4, 6], [0, 2], [2, 4], [8, 9], [0, 1]]) == [[0, 6], [8, 9]]
