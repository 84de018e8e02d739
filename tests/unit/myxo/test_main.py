"""The command line itself: help, version, errors of use, ``flags``, ``link``, the resolved config as TOML, and what importing it costs."""

import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import shared
from myxo.commands import evaluate, up
from myxo.commands.flag_list import completion, flag_list, lines_of, meanings
from myxo.commands.up import dry_run, leading
from myxo.main import COMMANDS, NEAR_WORDS, main, parse
from myxo.preflight import Source, checked_config
from shared.config import config_reading, flag_table, flags
from shared.config.config_layers import over
from shared.config.config_reading import parse as parse_config
from shared.config.run_config import RunConfig
from shared.runtime import exit_codes
from shared.runtime.errors import BadInput, ConfigError, problems_of
from shared.runtime.exit_codes import BAD_INPUT
from tests.support.run_config import run_config
from tests.support.tables import table


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


def test_what_would_be_taken_without_effect_is_refused_or_noted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = said(capsys, "init", "model", "data.jsonl", "--rm-type", "math", "--custom-rm-path", "my:score")
    assert code == BAD_INPUT and "not allowed with argument --rm-type" in err
    for words, note in ((["--no-try"], True), (["--no-try", "--dry-run"], False), ([], False)):
        dry_run(parse(["up", "run.toml", *words]))
        assert ("--no-try changes nothing" in capsys.readouterr().err) == note
    path = tmp_path / "serve.toml"
    path.write_text("[rollout]\nrollout_batch_size = 8\nrollout_replicas = 2\n[tinker]\ntinker_endpoint = true\n")
    found = list[str]()
    monkeypatch.setattr(up, "checked_config", lambda source, **_: found.extend(source.given.notes) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["serve", str(path)])
    assert [note.partition(" ")[0] for note in found] == ["rollout.rollout_batch_size"]


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


def test_every_flag_that_is_taken_has_a_line() -> None:
    out = io.StringIO()
    assert flag_list(None, Console(file=out)) == 0
    named = [line.split()[0].rstrip(",") for line in out.getvalue().splitlines()]
    assert named == [flag.command_line[0] for flag in flag_table.catalogue().values() if not flag.refused]


def test_a_line_tells_kind_default_and_what_megatron_says() -> None:
    (line,) = lines_of("moe-router-dtype")
    assert "fp32|fp64, default fp32: " in line
    assert meanings()["moe_router_dtype"] in line
    (line,) = lines_of("--hidden_dropout")
    assert "float, always 0.0: log-probs must be" in line
    (line,) = lines_of("norm-epsilon")
    assert "float, compared with the checkpoint's: " in line


def test_a_pattern_finds_fields_of_the_config_and_refused_flags() -> None:
    lines = lines_of("warmup")
    assert any(line.split()[0] == "--lr-warmup-iters" and "steps of linear warm-up" in line for line in lines)
    assert any(line.split()[0] == "--lr-warmup-samples" and "not taken: use lr" in line for line in lines)
    assert len({line.split()[0] for line in lines}) == len(lines)


def test_each_command_that_takes_the_configs_flags_completes_them() -> None:
    pytest.importorskip("shtab")
    out = io.StringIO()
    assert completion("bash", Console(file=out)) == 0
    with_flags = re.findall(r"^_shtab_myxo_(\w+)_option_strings=.* --rollout-batch-size ", out.getvalue(), re.MULTILINE)
    assert {"up", "train", "submit", "eval", "doctor", "serve", "try", "plan", "bisect", "quickstart"} == set(with_flags)


def test_a_pattern_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="PATTERN = 'qqq': no flag's name holds it"):
        flag_list("qqq", Console(file=io.StringIO()))


LEAST = "--hf-checkpoint /no/model --prompt-data /no/p.jsonl --num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --rm-type math"
SFT = "--hf-checkpoint /no/model --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss"


def told(source: Source) -> list[str]:
    with pytest.raises(BadInput) as caught:
        checked_config(source)
    return [str(problem) for problem in problems_of(caught.value)]


@table(
    ("words", "begins"),
    [
        (f"{LEAST} --lr -1", "--lr (trainer.lr) = '-1': "),
        (f"{LEAST} --lr=-1", "--lr (trainer.lr) = '-1': "),
        ("--prompt-data /no/p.jsonl --num-rollout 3 --rollout-batch-size 4", "--hf-checkpoint (model.hf_checkpoint) = None: required"),
        (f"{LEAST} --tensor-model-parallel-size 3", "--tensor-model-parallel-size (trainer.tensor_model_parallel_size) = "),
        (f"{LEAST} --tensor-model-parallel-size 3 --context-parallel-size 2", "--tensor-model-parallel-size (trainer.tensor_model_"),
        (f"{LEAST} --eval-prompt-data a /no/a.jsonl b /no/b.jsonl", "--eval-prompt-data (eval.eval_prompt_data.a) = '/no/a.jsonl': "),
        (f"{LEAST} --distributed-timeout-minutes 0", "--distributed-timeout-minutes (trainer.collective_timeout) = 0.0: "),
        (f"{LEAST} --no-use-tis --off-policy decoupled", "--no-use-tis (algorithm.use_tis) = "),
        (f"{LEAST} --sglang-page-size", "--sglang-page-size (rollout.sglang.page-size) = True: "),
        (
            f"{SFT} --prompt-data /no/p.jsonl --num-rollout 3 --rollout-batch-size 4",
            "--prompt-data (sft.sft_data) = '/no/p.jsonl': no such file",
        ),
        (f"{LEAST} --lrr 1", "--lrr = '': unknown flag; did you mean --lr?"),
    ],
)
def test_an_error_names_the_flag_that_was_typed(words: str, begins: str) -> None:
    found = told(up.train_source(None, words.split()))
    assert any(problem.startswith(begins) for problem in found), found


def test_what_a_file_sets_is_named_by_its_field(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[trainer]\nlr = -1.0\n")
    found = told(Source(path, flags.read(["--rollout-top-p", "7", "--hf-checkpoint", "/no/model", "--rollout-batch-size", "4"])))
    assert any(problem.startswith("trainer.lr = -1.0: ") for problem in found), found
    assert any(problem.startswith("--rollout-top-p (rollout.rollout_top_p) = '7': ") for problem in found), found


RUN = "[run]\nname = 'r'\n[model]\nhf_checkpoint = '/no/model'\n[data]\nprompt_data = '/no/p.jsonl'\n"
STEPS = "[rollout]\nrollout_batch_size = 2\nn_samples_per_prompt = 2\nnum_rollout = 1\n"


@pytest.mark.parametrize(
    ("temperature", "begins"),
    [
        (-1, "--eval-config (eval.sets.bad.temperature) = -1: "),
        (1, "--eval-config (eval.sets.bad) = '/no/bad.jsonl': "),  # refused by a check of files, long after the sets were read
    ],
)
def test_a_set_of_a_file_is_named_with_the_file(tmp_path: Path, temperature: int, begins: str) -> None:
    file = tmp_path / "tasks.yaml"
    sets = [{"name": "ok", "path": "/no/ok.jsonl"}, {"name": "bad", "path": "/no/bad.jsonl", "temperature": temperature}]
    file.write_text(json.dumps({"eval": {"datasets": sets}}))
    found = told(up.train_source(None, f"{LEAST} --eval-config {file}".split()))
    assert any(problem.startswith(begins) and problem.endswith(f"(in {file})") for problem in found), found


def test_a_file_below_the_config_is_named_where_its_value_is_refused_late(tmp_path: Path) -> None:
    base = tmp_path / "model.toml"
    base.write_text(RUN)
    path = tmp_path / "run.toml"
    path.write_text(f"base = 'model.toml'\n{STEPS}")
    found = told(Source.of(path, []))
    assert any(problem.startswith("model.hf_checkpoint = ") and problem.endswith(f"(in {base})") for problem in found), found


def test_a_run_to_evaluate_that_is_not_there_is_told_with_what_could_be_given(tmp_path: Path) -> None:
    (tmp_path / "arithmetic").mkdir()
    (tmp_path / "arithmetic" / "lock").touch()
    for typed, words in (("arithmetik", "did you mean arithmetic?"), (str(tmp_path / "none.toml"), "nor is there a file ")):
        with pytest.raises(BadInput, match=f"RUN = '{typed}': .*{words}".replace("?", r"\?")):
            evaluate.config_of(typed, tmp_path, flags.read([]))


def test_flags_over_a_run_to_evaluate_are_named_too(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN + STEPS)
    with pytest.raises(BadInput, match=r"^--eval-top-p \(eval.eval_top_p\) = '7': "):
        evaluate.config_of(str(path), tmp_path, flags.read(["--eval-top-p", "7"]))


def test_a_files_demonstrations_are_not_the_prompts_flag(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[sft]\nsft_data = "/no/sft.jsonl"\n')
    typed = ["--prompt-data", "/no/p.jsonl", "--lr", "1e-3", "--hf-checkpoint", "/no/model", "--rollout-batch-size", "4"]
    found = told(Source(path, flags.read(typed)))
    assert any(problem.startswith("sft.sft_data = '/no/sft.jsonl': no such file") for problem in found), found


SERVE = ["--serve", "127.0.0.1:0", "--certificate", "absent.pem", "--key", "absent.pem"]


@table(
    ("words", "error"),
    [
        (["--hub", "http://hub"], "--hub = 'http://hub': expected https://HOST"),
        (["--hub", "https://user:x@hub"], "without credentials"),
        (["--hub", "https://hub/path"], "without credentials or a path"),
        (["--hub", "hub"], "expected https://HOST"),
        (["--hub", "https://hub", "--objects", "store:1"], "--objects = 'store:1': expected with --serve alone"),
        (["--hub", "https://hub", "--nats", "nats"], "--nats = 'nats': expected HOST:PORT"),
        (["--serve", "127.0.0.1:443"], "--certificate"),
        (["--serve", "127.0.0.1:443", *SERVE[2:]], "expected a PEM certificate with its --key"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(
    words: list[str], error: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MYXO_CA_FILE", raising=False)
    assert main(["link", *words]) == 2
    assert error in capsys.readouterr().err


PLAIN = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3),
    max_leaves=8,
)


def test_every_section_and_field_is_there(tmp_path: Path) -> None:
    text = config_reading.dump(run_config(tmp_path))
    for section in RunConfig.model_fields:
        assert f"[{section}]" in text
    assert "num_rollout = 4" in text
    assert "# eval_interval = none" in text


def test_reads_back_the_same(tmp_path: Path) -> None:
    config = run_config(
        tmp_path,
        rollout={"rollout_stop": ['"', "\\", "\n", "é\x7f"], "sglang": {"mem-fraction-static": 0.5, "disable-radix-cache": True}},
        data={"apply_chat_template_kwargs": {"enable thinking": False}},
        trainer={"lr": 1e-6},
    )
    assert parse_config(tomllib.loads(config_reading.dump(config))) == config


def test_null_of_the_users_own_tables_reads_back(tmp_path: Path) -> None:
    own, inner = {"stages": [None, 3], "limit": None, "more": {"text": 'a: null {"b": 1}'}}, {"leg_counting": {"seed": None}}
    config = run_config(
        tmp_path,
        run={"name": "run", "custom_args": own},
        data={"prompt_data": None, "apply_chat_template_kwargs": own},
        curriculum={"reasoning_gym": ["leg_counting"], "reasoning_gym_parameters": inner},
        eval={"sets": [{"name": "own", "path": "p", "agent_options": own, "metadata_overrides": own}]},
        rollout={"agent_options": own, "models": {"other": {"hf_checkpoint": str(tmp_path), "sglang": {"dtype": None, "dp-size": 2}}}},
    )
    read = tomllib.loads(config_reading.dump(config))
    assert parse_config(read) == config
    above = over(read, {"rollout": {"models": {"other": {"replicas": 3, "sglang": {"max-running-requests": 8}}}}})
    other = parse_config(above).rollout.models["other"]
    assert other.hf_checkpoint == config.rollout.models["other"].hf_checkpoint
    assert other.sglang == {"dtype": None, "dp-size": 2, "max-running-requests": 8}


def test_json_text_over_json_text_takes_its_place() -> None:
    """SGLang has flags whose values are JSON."""
    below, above = ({"rollout": {"sglang": {"mm-process-config": text}}} for text in ('{"image": {}}', '{"video": {}}'))
    assert over(below, above) == above


@given(PLAIN)
def test_any_value_survives(value: Any) -> None:
    config = run_config(Path("/x"), rollout={"sglang": {"value": value}})
    assert tomllib.loads(config_reading.dump(config))["rollout"]["sglang"]["value"] == value


def test_what_toml_cannot_say_is_refused(tmp_path: Path) -> None:
    config = run_config(tmp_path)
    config.rollout.sglang["value"] = object()
    with pytest.raises(TypeError, match="object has no form in TOML"):
        config_reading.dump(config)
