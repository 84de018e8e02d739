"""The examples with sums: what is prepared, and sums that grow."""

import hashlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.curriculum.figures import levels
from examples.curriculum.growing_sums import MOST_DIGITS, make
from shared.data.rollout_files import RolloutRecord, RolloutSample
from shared.data.tokenizer import Tokenizer
from tests.support.quickstart_reward import quickstart_reward
from tests.support.run_config import run_config

SCRIPT = Path(__file__).parents[3] / "examples" / "arithmetic" / "prepare.py"
SIZES = ["--train", "300", "--heldout", "50", "--demonstrations", "200"]


def prepare(folder: Path, *flags: str, program: tuple[str, ...] = (str(SCRIPT),)) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *program, *map(str, (folder, *flags))],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        cwd=SCRIPT.parents[2],
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("arithmetic") / "data"
    result = prepare(made, *SIZES)
    assert result.returncode == 0, result.stderr
    assert str(made) in result.stdout
    return made


@pytest.mark.extra
def test_it_runs_as_a_module_too(folder: Path) -> None:
    found = prepare(folder, "--if-missing", program=("-m", "examples.arithmetic.prepare"))
    assert (found.returncode, found.stdout) == (0, f"{folder}: there already, left as it is\n"), found.stderr
    imported = prepare(folder, "--if-missing", program=("-X", "importtime", str(SCRIPT))).stderr
    assert "shutil" in imported and "torch" not in imported, "a container that finds all done ends at once"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def operands(row: dict[str, Any]) -> tuple[int, int]:
    left, right = row["prompt"].removesuffix("=").split("+")
    return int(left), int(right)


def test_parts_have_the_sizes_asked_for_and_no_sum_in_common(folder: Path) -> None:
    parts = {name: [frozenset(operands(row)) for row in rows(folder / f"{name}.jsonl")] for name in ("train", "heldout", "sft")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 300, "heldout": 50, "sft": 200}
    assert len(set().union(*parts.values())) == 550


def test_labels_and_demonstrations_are_right_by_the_verifier(folder: Path) -> None:
    for name in ("train", "heldout"):
        assert all(row["label"] == str(sum(operands(row))) for row in rows(folder / f"{name}.jsonl"))
    for row in rows(folder / "sft.jsonl"):
        truth = sum(operands(row))
        assert quickstart_reward(row["response"], str(truth)) == 1.0
        assert quickstart_reward(row["response"], str(truth + 1)) == 0.0


def test_worked_demonstrations_are_the_share_asked_for_and_hold_every_carry(folder: Path) -> None:
    worked = [row for row in rows(folder / "sft.jsonl") if row["response"].startswith("(")]
    assert len(worked) == 130
    for row in worked:
        left, right = operands(row)
        totals = row["response"][1 : row["response"].index(")")].split(" ")
        for column, total in enumerate(totals):
            upto = 10 ** (column + 1)
            in_full = (left % upto + right % upto) // 10**column  # the digits' sum with the carry of all columns to the right
            assert total == f"{in_full:02d}"


def test_the_tokenizer_is_one_token_a_character_for_transformers_and_tokenizers_alike(folder: Path) -> None:
    text = "237+945=(12 08 11)1182"
    light, heavy = Tokenizer(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")
    ids = light.encode(text).tolist()
    assert len(ids) == len(text) and len(set(ids)) == len(set(text))
    assert heavy(text).input_ids == ids
    assert light.decode(ids) == heavy.decode(ids) == text
    assert light.stop_ids == [heavy.eos_token_id] == [light.encode("<eos>").tolist()[0]]
    assert light.encode("é").tolist() == [heavy.unk_token_id]
    assert light.render([{"role": "user", "content": text}], {}) == text


def test_the_model_loads_with_rows_for_every_token(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = Tokenizer(folder / "model")
    assert model.dtype == torch.float32
    assert model.config.vocab_size % 64 == 0 and model.config.vocab_size >= tokenizer.vocabulary_size
    prompt = torch.tensor([tokenizer.encode("237+945=").tolist()])
    assert torch.isfinite(model(prompt).logits).all()
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.stop_ids[0]


def test_a_seed_gives_the_same_files_and_another_gives_others(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digests(root: Path) -> dict[str, str]:
        return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in root.rglob("*") if path.is_file()}

    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    for name, seed in (("again", "0"), ("other", "1")):
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path / name), *SIZES, "--seed", seed])
        runpy.run_path(str(SCRIPT), run_name="__main__")  # in this process, which has torch already
    first, again, other = digests(folder), digests(tmp_path / "again"), digests(tmp_path / "other")
    assert first == again
    assert {name for name in first if first[name] != other[name]} == {
        "train.jsonl",
        "heldout.jsonl",
        "sft.jsonl",
        "model/model.safetensors",
    }


@pytest.mark.parametrize(("flag", "value"), [("--hidden-size", "100"), ("--worked", "1.5"), ("--heldout", "0")])
def test_a_value_out_of_range_is_refused_by_name(tmp_path: Path, flag: str, value: str) -> None:
    result = prepare(tmp_path / "data", flag, value)
    assert result.returncode == 2
    assert f"{flag} {value}" in result.stderr
    assert not (tmp_path / "data").exists()


# --- the example whose sums grow: the source, its data, and the table of a run


def test_sums_grow_with_what_the_model_can_do_and_shrink_again(tmp_path: Path) -> None:
    data = {"prompt_data": None, "data_source": "examples.curriculum.growing_sums:make"}
    source = make(run_config(tmp_path, data=data, curriculum={"level_groups": 4}))
    digits = []
    for step in range(60):
        rows = source.get_samples(4)
        left, right = map(int, rows[0]["prompt"].rstrip("=").split("+"))
        assert rows[0]["label"] == str(left + right)
        digits.append(rows[0]["metadata"]["level"] + 1)
        assert len(str(left)) == digits[-1] == len(str(right))
        source.observe([{"metadata": row["metadata"], "pass_rate": 1.0 if step < 30 else 0.0} for row in rows])
        if step == 17:
            other = make(run_config(tmp_path, data=data, curriculum={"level_groups": 4}))
            other.load_state(json.loads(json.dumps(source.state())))
            source = other
    assert digits[:6] == [1, 2, 3, 3, 3, 3] and digits[-1] == 1 and max(digits) == MOST_DIGITS


def test_the_table_is_of_the_responses_that_the_run_has_kept(tmp_path: Path) -> None:
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    sample = {"finish": "stop", "prompt_length": 3, "length": 1, "response": "2"}
    records = [
        RolloutRecord(
            group=f"g{number:08d}",
            attempt=0,
            status="trained",
            at=1.0,
            metadata={"level": number // 3},
            samples=[RolloutSample(index=index, reward=float(index < number), **sample) for index in range(4)],
        )
        for number in (2, 0, 4)
    ]
    (rollouts / "000000.jsonl").write_bytes(b"".join(record.line() for record in records))
    assert levels(tmp_path) == [(0, 0, 0.0), (2, 0, 0.5), (4, 1, 1.0)]
    command = [sys.executable, "-m", "examples.curriculum.figures", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.splitlines()
    assert [line.split() for line in shown[1:]] == [["0", "2", "0", "2", "0.25", "0.25"], ["1", "1", "4", "4", "1.00", "1.00"]]
