"""Bad input ends every command with exit code 2 and one line that names the field, the value and what would be right."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.run import run_access
from shared.process.embedded_servers import free_port
from tests.integration.myxo.command import Myxo
from tests.support.run_config import PROMPTS, write_jsonl

ConfigFile = Callable[..., Path]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at the servers of these tests."""
    monkeypatch.setattr(run_access, "ANSWER_SECONDS", 0.5)


def refused(myxo: Myxo, *words: str | Path, environment: dict[str, str] | None = None) -> str:
    """The one line a refused command prints."""
    code, out, err = myxo.run(*words, environment=environment)
    assert (code, out) == (2, ""), f"{code}\n{out}\n{err}"
    assert len(err.splitlines()) == 1, err
    assert err.startswith("myxo: ")
    return err


def test_prompts_that_are_left_out_are_told(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file(rollout={"rollout_max_prompt_len": 6})
    write_jsonl(tmp_path / "prompts.jsonl", [*PROMPTS[:2], {"prompt": "1+1=" * 2, "label": "2"}, {"question": "1+1="}])
    assert "prompts.jsonl:3" in refused(myxo, "up", config)
    assert "prompts.jsonl:4" in refused(myxo, "up", config, "--overlong-prompts", "filter")
    code, out, err = myxo.run("up", config, "--overlong-prompts", "filter", "--bad-prompts", "skip", "--print-config")
    assert code == 0
    assert tomllib.loads(out)["data"]["bad_prompts"] == "skip"
    [line] = err.splitlines()
    assert line.startswith("myxo: data.prompt_data: 2 of 4 prompts are left out (1 overlong, 1 bad); the first: ")
    assert f"{tmp_path}/prompts.jsonl:3" in line
    write_jsonl(tmp_path / "prompts.jsonl", [{"question": "1+1="}] * 3)
    assert "all are left out" in refused(myxo, "up", config, "--bad-prompts", "skip")
    assert "--bad-prompts (data.bad_prompts) = 'ignore'" in refused(myxo, "up", config, "--bad-prompts", "ignore")


def test_what_a_config_names_and_is_not_there(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config, prompts, heldout = config_file(), tmp_path / "prompts.jsonl", tmp_path / "heldout.jsonl"
    for words, told in (
        (("--prompt-data", prompts, f"{prompts}@[20:]"), f"data.prompt_data) = '{prompts}@[20:]': the slice is empty: the file has 9 rows"),
        (("--prompt-data", prompts, tmp_path / "none.jsonl"), f"(data.prompt_data) = '{tmp_path}/none.jsonl': no such file"),
        (("--prompt-data", f"{prompts}*0.01"), "the weight 0.01 of 9 prompts rounds to none"),
        (("--eval-prompt-data", f"{heldout}*2"), "demonstrations are all used, each once"),
        (("--data-source", "no_such_package.prompts:make"), "(data.data_source) = 'no_such_package.prompts:make': cannot be imported"),
        (("--agent-command", "no-such-agent --steps 3"), "= ['no-such-agent', '--steps', '3']: a program that this machine has"),
        (("--custom-rm-path", "tests.support.reward_hooks:absent"), "(reward.custom_rm_path) = 'tests.support.reward_hooks:absent'"),
        (("--rm-type", "graderr", "--environments", "{'grader': 'nats:grader'}"), "or environment; did you mean grader?"),
    ):
        assert told in refused(myxo, "up", config, *words)
    assert "CONFIG" in refused(myxo, "up", tmp_path / "absent.toml")


@pytest.mark.parametrize("command", [pytest.param("up", marks=pytest.mark.extra), "status"])
def test_servers_that_nobody_answers_at(myxo: Myxo, config_file: ConfigFile, command: str, tmp_path: Path) -> None:
    of, nats = config_file() if command == "up" else "tiny", f"127.0.0.1:{free_port()}"
    line = refused(myxo, command, of, environment={"NATS_URL": f"nats://me:hush@{nats}"})
    assert f"NATS_URL = 'nats://{nats}'" in line and "give nats://[user:password@]host:port" in line and "hush" not in line
    if command == "up":
        line = refused(myxo, "up", of, environment={"REDIS_URL": "redis://:hush@127.0.0.1:1"})
        assert "REDIS_URL = 'redis://127.0.0.1:1'" in line and "hush" not in line
        for url in ("localhost", "http://127.0.0.1:1", "nats://", "nats://127.0.0.1:port"):
            assert "NATS_URL" in refused(myxo, "up", of, environment={"NATS_URL": url})
        assert "NATS_URL = None: required" in refused(myxo, "submit", of)
        assert "REDIS_URL = None: required" in refused(myxo, "submit", of, environment={"NATS_URL": f"nats://{nats}"})
    assert not (tmp_path / "runs").exists(), "nothing is left of a launch that never was"


def test_a_run_that_is_not_there(myxo: Myxo, tmp_path: Path) -> None:
    (tmp_path / "arithmetic" / "logs").mkdir(parents=True)
    for command in ("status", "audit", "summary", "logs"):
        assert "did you mean arithmetic?" in refused(myxo, command, "arithmetik", "--dir", tmp_path)


def test_the_config_that_would_run_is_printed(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    engine = ("--sglang-mem-fraction-static", "0.5")
    words = ("--num-rollout", "10", "--dry-run", "--print-config", *engine, "--no-rope-fusion", "--num-layers", "2")
    config_file()
    over = tmp_path / "over.toml"
    over.write_text('base = "run.toml"\n[trainer.megatron]\nmoe-router-dtype = "fp64"\nnum-layers = 36\n')
    code, out, err = myxo.run("up", over, *words)
    assert (code, err) == (0, "")
    shown = tomllib.loads(out)
    assert shown["rollout"]["num_rollout"] == 10
    assert shown["rollout"]["sglang"] == {"mem-fraction-static": "0.5"}
    assert shown["run"]["dir"] == str(tmp_path / "runs")
    assert shown["trainer"]["lr"] == 1e-6
    assert shown["trainer"]["megatron"] == {"moe_router_dtype": "fp64", "num_layers": 2, "apply_rope_fusion": False}
    assert not (tmp_path / "runs").exists()
