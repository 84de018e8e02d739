"""The pages: what is made from the code, and their commands."""

import importlib
import pkgutil
import re
from typing import Any

import pytest

from docs import commands, config_page, errors_page
from myxo.main import COMMANDS
from shared.config.run_config import RunConfig, changes, field_sections, section_model
from shared.runtime.errors import MyxoError
from tests.support.tables import table

ROWS = re.findall(r"^\| `(\w+)` \|(.*)\|$", config_page.render(), re.MULTILINE)
CELLS = {field: [cell.strip() for cell in re.split(r"(?<!\\)\|", rest)] for field, rest in ROWS}
"""Field → value, unit, default, resume, meaning."""

SEVERAL = {"trainer.lr": 3e-5, "trainer.save_interval": 7, "rollout.rollout_replicas": 3, "rollout.max_staleness": 5}
SMALLEST = {
    "run": {"name": "reference"},
    "model": {"hf_checkpoint": "models/m"},
    "data": {"prompt_data": "p.jsonl"},
    "reward": {"rm_type": "math"},
    "rollout": {"rollout_batch_size": 2, "n_samples_per_prompt": 2, "num_rollout": 1},
}


def test_every_field_of_the_config_has_its_line_once() -> None:
    assert [field for field, _ in ROWS] == list(field_sections())
    for field, (value, unit, default, resume, meaning) in CELLS.items():
        info = section_model(field_sections()[field]).model_fields[field]
        assert value and meaning and "shared." not in value, field
        assert (default == "required") == info.is_required(), field
        assert resume in ("", "may change", "recorded"), field
        assert not unit or re.search(r"integer|number", value), field


def test_units_are_told_where_numbers_have_one() -> None:
    units = {field: cells[1] for field, cells in CELLS.items()}
    assert all(units[field] == "seconds" for field in units if field.endswith(("_timeout", "_wait", "_duration", "_ttl")))
    assert all(units[field] == "bytes" for field in units if field.endswith("_bytes"))
    assert units["logprob_alarm"] == "nats" and units["max_tokens_per_gpu"] == "tokens" and units["lr"] == ""


@table("path", SEVERAL)
def test_what_may_change_is_what_a_resume_takes(path: str) -> None:
    section, field = path.split(".")
    before = RunConfig.model_validate(SMALLEST)
    given: dict[str, Any] = {**SMALLEST, section: {**SMALLEST.get(section, {}), field: SEVERAL[path]}}
    after = RunConfig.model_validate(given)
    assert getattr(getattr(after, section), field) != getattr(getattr(before, section), field)
    assert bool(changes(before, after)) == (CELLS[field][3] == "")


def test_every_error_says_what_to_do() -> None:
    found = errors_page.named_errors()
    assert errors_page.incomplete(set(found)) == []
    assert errors_page.incomplete({*found, "Invented"}) == ["Invented: docs/error_remedies.toml does not say what to do about it"]
    assert len(errors_page.incomplete(set(found) - {"StoreFull"})) == 1
    assert all(error.meaning.endswith((".", "!")) for error in found.values()), "a sentence"


def test_the_errors_found_in_the_source_are_those_that_python_knows() -> None:
    for package in ("shared", "services.buffer", "services.reward", "services.gateway", "myxo"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith("__main__") and not module.name.startswith(("shared.transfer", "shared.hooks.slime")):
                importlib.import_module(module.name)
    known, waiting = set[str](), [MyxoError]
    while waiting:
        children = [kind for kind in waiting.pop().__subclasses__() if kind.__module__.startswith(("shared.", "services.", "myxo."))]
        waiting += children
        known |= {kind.__name__ for kind in children if not kind.__name__.startswith("_")}
    assert len(known) > 40
    assert known <= set(errors_page.named_errors())


# --- the commands in the documentation: ``myxo`` takes each of them, and one that it does not take is found


def test_every_command_on_every_page_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    code = commands.main()
    assert code == 0, capsys.readouterr().out


def test_the_page_of_commands_has_each_of_them() -> None:
    page = (commands.ROOT / "docs" / "commands.md").read_text()
    assert [name for name in COMMANDS if f"`myxo {name}" not in page] == []


@table(
    ("line", "told"),
    [
        ("myxo upp run.toml", "did you mean up"),
        ("myxo logs RUN --folow", "unrecognized arguments: --folow"),
        (".venv/bin/myxo up run.toml --rollout-batchsize 4", "rollout-batch-size"),
        ("NATS_URL=nats://h:4222 myxo submit run.toml --max-stalenes 2", "max-staleness"),
        ("myxo train run.toml --lrr 1", "unknown flag"),
        ("myxo samples RUN --status gone > list.txt", "invalid choice: 'gone'"),
        ("myxo accounts", "required"),
    ],
)
def test_what_is_not_taken_is_found(line: str, told: str) -> None:
    assert [problem for problem in commands.refused(line, whole=True) if told in problem], commands.refused(line, whole=True)


@table("line", ["myxo accounts", "myxo up --dry-run", "myxo eval RUN --version N", "myxo doctor [CONFIG]", "make test"])
def test_what_a_sentence_names_may_leave_out_what_a_command_needs(line: str) -> None:
    assert commands.refused(line, whole=False) == []


def test_lines_of_a_shell_are_read_as_one_reads_them() -> None:
    assert commands.refused("myxo train --lr 1e-6 --print-config > run.toml", whole=True) == []
    assert commands.refused("FLAGS='--lr 1' myxo up run.toml --lr 2e-6 && ls", whole=True) == []
