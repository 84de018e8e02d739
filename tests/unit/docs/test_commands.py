"""The commands in the documentation: ``myxo`` takes each of them, and one that it does not take is found."""

import pytest

from docs import commands
from myxo.main import COMMANDS
from tests.support.tables import table


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
