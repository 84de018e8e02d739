"""A source of the user's own: what a group was given once it is given again, whatever the source does."""

import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shared.config.run_config import RunConfig
from shared.data import data_source, source_process
from shared.data.data_source import DrawnPrompts, GroupResult, ResultLog, merged
from shared.data.source_process import opened
from shared.data.tokenizer import Tokenizer
from shared.hooks import Arguments
from shared.hooks.slime.prompt_sources import RolloutDataSourceWithBuffer
from shared.runtime.errors import ConfigError
from tests.support import adaptive_source
from tests.support.fork_server import forked_python
from tests.support.run_config import run_config

__all__ = ["forked_python"]

SOURCE = '''
import os
import sys
import time
from types import SimpleNamespace

from slime.rollout.data_source import RolloutDataSource


class Counting:
    """Gives what no other life of it gives, and knows where it is."""

    def __init__(self, config):
        self.life, self.at = os.getpid(), 0

    def get_samples(self, n):
        first, self.at = self.at, self.at + n
        return [{"prompt": f"{number}+1=", "label": number + 1, "metadata": {"life": self.life}} for number in range(first, self.at)]

    def state(self):
        return {"at": self.at}

    def load_state(self, value):
        self.at = value["at"]


class Stateless:
    """Slime's groups of samples, without states."""

    def __init__(self, config):
        self.at = 0

    def get_samples(self, n):
        first, self.at = self.at, self.at + n
        return [[SimpleNamespace(prompt=f"{number}+1=", label=str(number + 1), metadata={})] * 2 for number in range(first, self.at)]


class Mixed(Stateless):
    def get_samples(self, n):
        first, self.at = self.at, self.at + n
        kinds = ({"prompt": "1+1=", "label": "2"}, {"prompt": "1" * 30, "label": "2"}, {"question": "1+1="})
        return [{**kinds[number % 3], "metadata": {"number": number}} for number in range(first, self.at)]


class EveryOther(RolloutDataSource):
    """The rows of the run's files but each second one."""

    def get_samples(self, num_samples):
        groups = super().get_samples(2 * num_samples)[::2]
        for group in groups:
            for sample in group:
                sample.metadata = {**sample.metadata, "epoch": self.epoch_id, "index": sample.index}
        return groups


class Dry:
    def __init__(self, config):
        pass

    def get_samples(self, n):
        return []


class Other:
    def __init__(self, config):
        pass


class Leaving(Counting):
    def get_samples(self, n):
        if self.at == 2:
            sys.exit("enough")
        return super().get_samples(n)


class Recovering(Counting):
    def get_samples(self, n):
        if self.at == 1 and os.path.exists(once := os.path.join(os.path.dirname(__file__), "once")):
            os.remove(once)
            raise RuntimeError("away")
        return super().get_samples(n)


class Hanging(Counting):
    def get_samples(self, n):
        if self.at == 1:
            time.sleep(600)
        return super().get_samples(n)


class OfSlimes:
    """A class in slime's manner: groups of samples, its position in files, its prompts rendered."""

    def __init__(self, args):
        self.args, self.at, self.life = args, 0, os.getpid()

    def get_samples(self, num_samples):
        first, self.at = self.at, self.at + num_samples
        made = {"life": self.life, "batch": self.args.rollout_batch_size}
        numbers = range(first, self.at)
        return [[SimpleNamespace(prompt=f"<|user|>{number}+1=", label=str(number + 1), metadata=made)] * 2 for number in numbers]

    def add_samples(self, samples):
        raise RuntimeError("read only")

    def save(self, rollout_id):
        with open(f"{self.args.save}/at_{rollout_id}", "w") as file:
            file.write(str(self.at))

    def load(self, rollout_id=None):
        with open(f"{self.args.load}/at_{rollout_id}") as file:
            self.at = int(file.read())

    def __len__(self):
        return 1000


number = 3
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "a_source_of_prompts.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield "a_source_of_prompts"
    sys.modules.pop("a_source_of_prompts", None)


@pytest.fixture(autouse=True)
def closed_sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the processes of a test's sources with it."""
    made, begin = list[source_process.SourceProcess](), source_process.SourceProcess.__init__

    def noted(self: source_process.SourceProcess, config: RunConfig) -> None:
        made.append(self)
        begin(self, config)

    monkeypatch.setattr(source_process.SourceProcess, "__init__", noted)
    yield
    for one in made:
        one.close()


def config_of(tmp_path: Path, source: str, **data: Any) -> RunConfig:
    sections = {"data": {"prompt_data": None, "data_source": source, **data}, "rollout": {"rollout_max_prompt_len": 20}}
    return run_config(tmp_path, **sections)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_a_group_keeps_its_prompt_over_restarts(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}:Counting")
    first = DrawnPrompts(config, tokenizer)
    given = [first.at(number) for number in (0, 1, 2, 1)]
    assert [prompt.content for prompt in given] == ["0+1=", "1+1=", "2+1=", "1+1="]
    second = DrawnPrompts(config, tokenizer)
    assert len(second) == 3
    assert [second.at(number).metadata for number in range(3)] == [given[0].metadata] * 3, "read, not drawn again"
    assert second.at(4).content == "4+1=", "drawn behind the last state"
    assert second.at(3).metadata != given[0].metadata, "by the source's second life"


def test_two_buffers_go_on_behind_each_other(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}:Counting")
    active, standby = DrawnPrompts(config, tokenizer), DrawnPrompts(config, tokenizer)
    for number in range(6):
        drawing, reading = (active, standby) if number < 3 else (standby, active)
        assert drawing.at(number).content == f"{number}+1="
        assert reading.at(number).metadata == drawing.at(number).metadata


def test_a_source_without_states_is_asked_again(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}:Stateless")
    assert DrawnPrompts(config, tokenizer).at(299).label == "300"
    assert DrawnPrompts(config, tokenizer).at(300).label == "301"


def test_a_line_that_was_cut_off_does_not_count(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}:Counting")
    DrawnPrompts(config, tokenizer).at(2)
    path = config.run.root / "prompts" / "drawn.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = DrawnPrompts(config, tokenizer)
    assert len(again) == 2
    assert [again.at(number).content for number in range(5)] == [f"{number}+1=" for number in range(5)]
    third = DrawnPrompts(config, tokenizer)
    assert [third.at(number).metadata for number in range(5)] == [again.at(number).metadata for number in range(5)]


def test_prompts_are_left_out_as_they_are_drawn(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}:Mixed", overlong_prompts="filter", bad_prompts="skip")
    drawn = DrawnPrompts(config, tokenizer)
    assert [drawn.at(number).metadata["number"] for number in range(3)] == [0, 3, 6]
    assert drawn.left_out == {"overlong": 2, "bad": 2}
    again = DrawnPrompts(config, tokenizer)
    assert again.left_out == {"overlong": 2, "bad": 2}
    assert again.at(3).metadata["number"] == 9


def test_a_prompt_that_cannot_be_used_costs_its_own_group_alone(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}:Mixed")
    for newest in (0, 6):  # the second buffer asks a source without states again for as many as were drawn
        drawn = DrawnPrompts(config, tokenizer)
        assert drawn.at(newest).metadata["number"] == newest
        for number, words in ((1, "at most rollout_max_prompt_len"), (2, "has no key .prompt."), (1, "at most rollout_max_prompt_len")):
            with pytest.raises(ConfigError, match=words) as caught:
                drawn.at(number)
            assert f"prompt {number}" in str(caught.value.value)
        assert drawn.at(3).metadata["number"] == 3, "group k gets prompt k"
    drawn.results.add([GroupResult(1, "dead", (), "x")])
    assert drawn._message(0)["metadata"] == {"number": 1}, "the row that was refused"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Absent", "cannot be imported"),
        ("number", "expected a function, found a int"),
        ("Dry", r"get_samples\(1\) gave \[\]"),
        ("Other", "has no get_samples"),
    ],
)
def test_what_is_no_source_is_refused(tmp_path: Path, module: str, tokenizer: Tokenizer, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        DrawnPrompts(config_of(tmp_path, f"{module}:{name}"), tokenizer).at(0)
    assert caught.value.field == "data.data_source"


def test_the_config_names_a_module_and_a_function(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'no_such_module'"):
        DrawnPrompts(config_of(tmp_path, "no_such_module:make"), tokenizer)
    for text in ("module", "module:", ":make", "a b:c", "module:make()"):
        with pytest.raises(ConfigError) as caught:
            config_of(tmp_path, text)
        assert caught.value.field == "data.data_source"
    with pytest.raises(ConfigError, match=r"data\.prompt_data = None: required"):
        run_config(tmp_path, data={"prompt_data": None})


def test_a_prompt_that_was_drawn_waits_for_no_source(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    drawn, found = DrawnPrompts(config_of(tmp_path, f"{module}:Counting"), tokenizer), list[str]()
    drawn.at(1)
    with drawn._lock:  # as while another is drawn, which may take minutes
        reader = threading.Thread(target=lambda: found.extend(drawn.at(number).content for number in (0, 1)), daemon=True)
        reader.start()
        reader.join(20)
        assert found == ["0+1=", "1+1="]


def test_a_line_of_the_file_says_what_was_drawn(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}:Counting")
    DrawnPrompts(config, tokenizer).at(0)
    [line] = (config.run.root / "prompts" / "drawn.jsonl").read_text().splitlines()
    record = SimpleNamespace(**json.loads(line))
    assert (record.number, record.drawn, record.state, record.left_out) == (0, 1, {"at": 1}, {"overlong": 0, "bad": 0})
    assert record.entry["prompt"] == "0+1="


def test_a_class_in_slimes_manner(tmp_path: Path, module: str, tokenizer: Tokenizer) -> None:
    config = config_of(tmp_path, f"{module}.OfSlimes", apply_chat_template=True)
    first = DrawnPrompts(config, tokenizer)
    given = [first.at(number) for number in range(5)]
    assert [prompt.content for prompt in given] == [f"<|user|>{number}+1=" for number in range(5)]
    assert given[0].tokens.tolist() == tokenizer.encode("<|user|>0+1=").tolist(), "rendered already: no template is laid over it"
    assert sorted(path.name for path in (config.run.root / "prompts" / "source").iterdir()) == ["at_1", "at_2"], "two prompts a batch"
    second = DrawnPrompts(config, tokenizer)
    again = [second.at(number) for number in range(7)]
    assert [prompt.content for prompt in again] == [f"<|user|>{number}+1=" for number in range(7)]
    assert again[4].metadata == given[4].metadata and again[5].metadata != given[4].metadata


def test_a_source_that_ends_its_process_or_hangs_costs_a_prompt(
    tmp_path: Path, module: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_process, "ANSWER_SECONDS", 1.0)
    late = "it did not answer within 1 s; its process was killed"
    for name, count, words in (("Leaving", 2, "SystemExit: enough"), ("Hanging", 1, late)):
        drawn = DrawnPrompts(config_of(tmp_path / name, f"{module}:{name}"), tokenizer)
        assert [drawn.at(number).content for number in range(count)] == [f"{number}+1=" for number in range(count)]
        for number in (count, count, count + 1):  # it is started again, and fails again at the same place
            with pytest.raises(ConfigError, match=words):
                drawn.at(number)
        assert drawn.at(0).content == "0+1="
    (tmp_path / "once").touch()
    drawn = DrawnPrompts(config_of(tmp_path / "Recovering", f"{module}:Recovering"), tokenizer)
    with pytest.raises(ConfigError, match="RuntimeError: away"):
        drawn.at(1)
    assert [drawn.at(number).content for number in (0, 2)] == ["0+1=", "1+1="], "group 2 gets what came next"


def test_a_class_that_derives_from_slimes_own(tmp_path: Path, module: str, tokenizer: Tokenizer, tiny_model: Path) -> None:
    rows = [{"prompt": f"{number}+{number}=", "label": number * 2} for number in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_source": f"{module}.EveryOther", "prompt_data": [f"{tmp_path}/rows.jsonl"]}
    config = run_config(tmp_path, data=data, model={"hf_checkpoint": str(tiny_model)})
    drawn = DrawnPrompts(config, tokenizer)
    given = [drawn.at(number) for number in range(4)]
    assert [prompt.content for prompt in given] == ["0+0=", "2+2=", "4+4=", "1+1="], "the second epoch begins in the middle of a pair"
    assert [prompt.metadata["epoch"] for prompt in given] == [0, 0, 1, 1]
    assert [(prompt.label, prompt.metadata["index"]) for prompt in given[:2]] == [("0", 0), ("4", 4)]
    assert [DrawnPrompts(config, tokenizer).at(number).content for number in (4, 5)] == ["3+3=", "0+0="], "as a source that continued"


def test_a_source_with_a_buffer_gives_what_it_got_back_first(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{number}+1=", "label": "2"}) + "\n" for number in range(6)))
    sections = {"data": {"prompt_data": [f"{tmp_path}/rows.jsonl"], "rollout_shuffle": True}, "model": {"hf_checkpoint": str(tiny_model)}}
    args = Arguments(run := run_config(tmp_path, **sections), run_config=run, save=str(tmp_path), load=str(tmp_path))
    source = RolloutDataSourceWithBuffer(args)
    first = source.get_samples(3)
    source.add_samples(first[1:])
    assert source.get_buffer_length() == 2
    again = source.get_samples(3)
    assert again[:2] == first[1:] and again[2][0].group_index == 3
    source.save(7)
    rest = [group[0].prompt for group in source.get_samples(4)]
    other = RolloutDataSourceWithBuffer(args)
    other.load(7)
    assert [group[0].prompt for group in other.get_samples(4)] == rest
    assert other.epoch_id == 1 and len({group[0].prompt for group in (*first, again[2])} | set(rest[:2])) == 6
    with pytest.raises(ValueError, match="a list of 2 samples"):
        source.add_samples([first[0][:1]])


# --- a source in its own process that hears results: what it raises, and where it hangs or dies over them, costs those results alone

BATCHES = 5


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
