"""The command line itself: help, version, errors of use, and what importing it costs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import shared
from myxo.commands.up import dry_run, leading
from myxo.main import COMMANDS, NEAR_WORDS, main, parse
from shared.config import flags
from shared.runtime import exit_codes
from shared.runtime.exit_codes import BAD_INPUT


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = main(words)
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else 1
    out = capsys.readouterr()
    return code, out.out, out.err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == (0, f"myxo {shared.__version__}\n", "")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "--help")
    for command in COMMANDS:
        assert command in out


@pytest.mark.parametrize("words", [("up", "--help"), ("up", "run.toml", "--help"), ("submit", "run.toml", "--num-rollout", "3", "-h")])
def test_help_of_up_lists_every_flag(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, _ = said(capsys, *words)
    assert code == 0
    for flag in flags.flags():
        assert flag in out


@pytest.mark.parametrize("words", [(), ("bla",), ("up",), ("audit",), ("logs", "x", "-n", "-3"), ("logs", "x", "--level", "loud")])
def test_wrong_use_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, err = said(capsys, *words)
    assert (code, out) == (exit_codes.BAD_INPUT, "")
    assert len(err.splitlines()) == 1
    assert err.startswith("myxo")


def test_the_value_of_a_flag_is_no_path_before_it() -> None:
    for words, path in {"--num-rollout 5": None, "there --num-rollout 5": Path("there"), "--fresh there": Path("there"), "": None}.items():
        parsed = parse(["quickstart", *words.split()])
        assert leading(parsed.flags) == (path, ["--num-rollout", "5"] if "5" in words else []), words
    assert leading(parse(["doctor", "--lr", "1e-5", "--json"]).flags) == (None, ["--lr", "1e-5"])


def test_what_would_be_taken_without_effect_is_refused_or_noted(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = said(capsys, "init", "model", "data.jsonl", "--rm-type", "math", "--custom-rm-path", "my:score")
    assert code == BAD_INPUT and "not allowed with argument --rm-type" in err
    for words, note in ((["--no-try"], True), (["--no-try", "--dry-run"], False), ([], False)):
        dry_run(parse(["up", "run.toml", *words]))
        assert ("--no-try changes nothing" in capsys.readouterr().err) == note


def test_near_words_lead_to_commands_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert NEAR_WORDS.keys().isdisjoint(COMMANDS)
    for word, told in NEAR_WORDS.items():
        assert said(capsys, word, "x")[2] == f"myxo: no command {word}; {told} (see myxo --help)\n"
    for told in set(NEAR_WORDS.values()):
        assert [command for command in re.findall(r"`myxo (\S+)", told) if command.rstrip("`") not in COMMANDS] == []
    assert "did you mean status" in said(capsys, "statsu")[2]


def test_services_and_commands_agree_on_the_code_for_bad_input() -> None:
    assert exit_codes.BAD_INPUT == BAD_INPUT


def test_no_command_needs_torch_or_matplotlib_to_start() -> None:
    modules = [where.partition(":")[0] for where, _ in COMMANDS.values()]
    code = (
        f"import sys, myxo.display.reward_chart, {', '.join(f'myxo.commands.{module}' for module in modules)}; "
        "sys.exit(','.join(name for name in ('torch', 'matplotlib', 'transformers', 'sglang', 'megatron') if name in sys.modules) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
