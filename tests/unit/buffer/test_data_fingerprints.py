"""What a file of prompts is known by, and which changes are refused."""

import os
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from services.buffer import buffer_service
from services.buffer.buffer_service import Buffer
from services.buffer.prompt_supply import (
    BLOCK_BYTES,
    MOST_BLOCKS,
    DataFingerprint,
    changed_files,
    decode_fingerprints,
    encode_fingerprints,
    fingerprint,
    fingerprints,
    named_files,
    touched_files,
)
from services.buffer.state import BufferState
from shared.runtime.errors import ConfigError
from shared.schema.ledger import EvalStarted
from tests.support.run_config import run_config
from tests.support.tables import table

LONG = MOST_BLOCKS * BLOCK_BYTES + 5


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "1 + 1 ="}\n')
    return path


def refusals(path: Path, then: DataFingerprint) -> list[str]:
    return [problem.expected for problem in changed_files({str(path): then}, {str(path): fingerprint(path)}, {path: "data.prompt_data"})]


def test_a_copy_is_no_change_and_another_text_is_one(file: Path) -> None:
    then = fingerprint(file)
    os.utime(file, ns=(0, 0))
    assert fingerprint(file) != then and refusals(file, then) == []
    file.write_text('{"prompt": "1 + 2 ="}\n')
    [same_length] = refusals(file, then)
    assert same_length.startswith("has changed, though not in length, since the run began") and "--accept-changed-data" in same_length
    file.write_text('{"prompt": "1 + 12 ="}\n')
    [longer] = refusals(file, then)
    assert longer.startswith("has changed from 22 to 23 bytes since the run began; put it back, or continue")
    file.write_text("")
    assert refusals(file, then) and refusals(file, fingerprint(file)) == []


@pytest.mark.parametrize("offset", [0, LONG - 1])
def test_both_ends_of_a_long_file_are_read(tmp_path: Path, offset: int) -> None:
    path = tmp_path / "long.jsonl"
    path.touch()
    os.truncate(path, LONG)
    then = fingerprint(path)
    assert then.sampled and touched_files({str(path): then}, {str(path): then}) == []
    with path.open("r+b") as writable:
        writable.seek(offset)
        writable.write(b"x")
    assert refusals(path, then)


def test_a_long_file_that_was_written_since_is_named(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.touch()
    os.truncate(path, 2 * LONG)
    then = fingerprint(path)
    os.utime(path, ns=(1, 1))
    assert refusals(path, then) == [] and touched_files({str(path): then}, {str(path): fingerprint(path)}) == [str(path)]


def test_the_runs_files_are_known_by_path_and_field(tmp_path: Path, file: Path) -> None:
    heldout = tmp_path / "heldout.jsonl"
    heldout.write_text("{}\n")
    config = run_config(tmp_path, data={"prompt_data": f"{file}@[0:1]"}, eval={"eval_prompt_data": str(heldout)})
    fields = named_files(config)
    assert list(fields.values()).count("data.prompt_data") == 1 and fields[file] == "data.prompt_data"
    assert fields[heldout].startswith("eval.eval_prompt_data")
    found = fingerprints(config)
    assert decode_fingerprints(encode_fingerprints(found)) == found and found.keys() == {str(file), str(heldout)}
    assert changed_files({}, found, fields) == [], "a file that is new to the run"
    heldout.unlink()
    with pytest.raises(ConfigError, match="heldout.jsonl"):
        fingerprints(config)


@table("data", [None, b"", b"nonsense", b"[]", b'{"a": {"size": "many"}}'])
def test_what_is_no_note_of_files_counts_as_none(data: bytes | None) -> None:
    assert decode_fingerprints(data) == {}


@pytest.mark.parametrize("evaluates", [False, True])
async def test_a_run_that_evaluates_alone_has_begun_with_its_first_evaluation(evaluates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    state, asked = BufferState(), list[bool]()
    if evaluates:
        state.apply(EvalStarted(dataset="heldout", version=0, prompts=2, at=0.0))

    async def check(*_: object, begun: bool) -> None:
        asked.append(begun)
        raise InterruptedError

    monkeypatch.setattr(buffer_service, "check_data", check)
    buffer = Mock(spec=[])
    buffer._ledger = Mock(follow=AsyncMock(), state=state)
    buffer._service = buffer._prompts = buffer._record = buffer._limits = Mock()
    with pytest.raises(InterruptedError):
        await Buffer._recover(buffer)
    assert asked == [evaluates]
