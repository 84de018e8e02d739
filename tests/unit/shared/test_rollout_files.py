"""The files of kept responses: a record as a line and back, lines that are cut off, groups that were written twice."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from shared.data import rollout_files
from shared.data.rollout_files import RolloutRecord
from shared.schema.sample import Sample
from tests.support.rollout_reader import RolloutReader
from tests.support.valid_messages import example


def sample(index: int = 0, **changes: Any) -> Sample:
    tokens = {"prompt": [7, 8], "response": [11, 12, 13], "log_probs": [-0.3, np.nan, -1.25], "mask": [1, 0, 1]}
    fields: dict[str, Any] = {
        **tokens,
        "segments": [(0, 2, 4), (2, 3, 5)],
        "text": 'fünf "\n',
        "prompt_text": [{"role": "user", "content": "2+3="}],
        "label": "5",
        "metadata": {"level": 2, "odd": float("inf"), "array": np.array([1, 2])},
    }
    return example(Sample, group="g00000001", index=index, **{**fields, **changes})


def record(group: str = "g00000001", attempt: int = 0, *, tokens: bool = False, **fields: Any) -> RolloutRecord:
    samples = [sample(), sample(1, text="sechs", metadata={})]
    return RolloutRecord.model_construct(
        group=group,
        attempt=attempt,
        **{"status": "trained", "step": 3, "version": 5, "at": 10.0, **fields},
        prompt=samples[0].prompt_text,
        label="5",
        metadata=samples[0].metadata,
        samples=[
            rollout_files.sample_of(one, samples[0], float(one.index), {"form": 0.5}, removed=False, stale=False, tokens=tokens)
            for one in samples
        ],
    )


def write(directory: Path, *contents: bytes) -> RolloutReader:
    directory.mkdir(exist_ok=True)
    for index, content in enumerate(contents):
        rollout_files.path_of(directory, index).write_bytes(content)
    return RolloutReader(directory)


def test_a_record_is_a_line_and_comes_back(tmp_path: Path) -> None:
    reader = write(tmp_path, record().line())
    [head] = reader.heads()
    assert (head.group, head.attempt, head.status, head.dataset, head.step, head.version) == ("g00000001", 0, "trained", None, 3, 5)
    (back,) = reader.records()
    assert (back.group, back.step, back.prompt, back.label) == ("g00000001", 3, [{"role": "user", "content": "2+3="}], "5")
    assert back.metadata == {"level": 2, "odd": None, "array": [1, 2]}
    assert [(one.response, one.reward, one.parts, one.prompt_length, one.length) for one in back.samples] == [
        ('fünf "\n', 0.0, {"form": 0.5}, 2, 3),
        ("sechs", 1.0, {"form": 0.5}, 2, 3),
    ]
    first, second = back.decoded()
    assert (first.text, first.segments, len(first.response)) == ('fünf "\n', [(0, 2, 4), (2, 3, 5)], 0)
    assert (second.prompt_text, second.label, second.metadata) == (first.prompt_text, "5", {})
    assert "prompt" not in json.loads(record().line())["samples"][1], "what the group has is not written again"


def test_labels_are_values_as_in_the_prompt_file() -> None:
    samples = [sample(label='{"a": [1]}', label_json=True), sample(1, label="42"), sample(2, label="42", label_json=True)]
    written = [rollout_files.sample_of(one, samples[0], 0.0, {}, removed=False, stale=False, tokens=False) for one in samples]
    whole = record().model_copy(update={"label": samples[0].reference.value, "samples": written})
    line = json.loads(whole.line())
    assert (line["label"], [one.get("label") for one in line["samples"]]) == ({"a": [1]}, [None, "42", 42])
    back = RolloutRecord.model_validate(line).decoded()
    assert [(one.label, one.label_json) for one in back] == [(one.label, one.label_json) for one in samples]


def test_token_ids_come_back_where_they_were_kept(tmp_path: Path) -> None:
    (back,) = write(tmp_path, record(tokens=True).line()).records()
    first = back.decoded()[0]
    for name in ("prompt", "response", "mask"):
        assert getattr(first, name).tolist() == getattr(sample(), name).tolist()
    np.testing.assert_allclose(first.log_probs, sample().log_probs, atol=1e-6)
    first.check()


def test_lines_that_are_cut_off_or_damaged_are_counted_and_passed_over(tmp_path: Path) -> None:
    whole = record().line()
    others = record("eval.heldout.2.7", status="evaluated", dataset="heldout", step=None).line()
    reader = write(tmp_path, whole + whole[:-20], b"\x00\xff\n" + whole[:200] + b"\n" + others + others[:-1])
    assert [one.group for one in reader.records()] == ["g00000001", "eval.heldout.2.7"]
    assert reader.torn == 3, "two ends of files, one line that is no record; the damaged copy of a group that is there is not looked at"


def test_of_what_was_written_twice_one_counts(tmp_path: Path) -> None:
    reader = write(tmp_path, record(attempt=1).line(), record(attempt=1).line() + record("g00000002").line())
    assert [(one.group, one.attempt) for one in reader.records()] == [("g00000001", 1), ("g00000002", 0)]
    assert [one.group for one in reader.records(lambda head: head.group != "g00000001")] == ["g00000002"]


def test_files_are_read_in_their_order_and_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for index, name in ((1_000_000, "g00000003"), (7, "g00000001"), (12, "g00000002")):
        rollout_files.path_of(tmp_path, index).write_bytes(record(name).line())
    assert [head.group for head in RolloutReader(tmp_path).heads()] == ["g00000001", "g00000002", "g00000003"]
    assert list(RolloutReader(tmp_path / "absent").heads()) == []
