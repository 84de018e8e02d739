"""Bad input ends every command with exit code 2 and one line that names the field, the value and what would be right."""

import tomllib
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
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


def test_a_prompt_line_without_its_key(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file()
    write_jsonl(tmp_path / "prompts.jsonl", [*PROMPTS[:2], {"question": "1+1=", "label": "2"}])
    line = refused(myxo, "up", config)
    assert "data.prompt_data:prompt" in line
    assert f"{tmp_path}/prompts.jsonl:3" in line
    assert "['label', 'question']" in line


def test_a_held_out_line_without_its_key(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file()
    write_jsonl(tmp_path / "heldout.jsonl", [{"prompt": "1+1="}])
    assert "eval.eval_prompt_data:label" in refused(myxo, "up", config)


def test_a_demonstration_that_is_not_text(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "sft.jsonl", [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+2=", "response": 3}])
    line = refused(myxo, "up", config_file(sft={"sft_data": tmp_path / "sft.jsonl"}))
    assert "sft.sft_data:response" in line
    assert "sft.jsonl:2" in line
    assert "expected text" in line


def test_a_line_that_is_not_json(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n{"prompt": \n')
    assert "prompts.jsonl:2" in refused(myxo, "up", config)


def test_a_line_without_the_label_that_its_verifier_needs(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file()
    write_jsonl(tmp_path / "prompts.jsonl", [PROMPTS[0], {"prompt": "1+1=", "label": None}])
    line = refused(myxo, "up", config)
    assert "data.prompt_data:label" in line
    assert f"{tmp_path}/prompts.jsonl:2" in line
    assert "the answer that exact compares with" in line


def test_files_slices_and_weights_that_are_none(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file()
    prompts, heldout = tmp_path / "prompts.jsonl", tmp_path / "heldout.jsonl"
    assert "data.prompt_data" in (line := refused(myxo, "up", config, "--prompt-data", f"{prompts}@[a:b]"))
    assert "give PATH, PATH@[start:stop] or PATH@[start:stop]*WEIGHT" in line
    line = refused(myxo, "up", config, "--prompt-data", prompts, f"{prompts}@[20:]")
    assert f"--prompt-data (data.prompt_data) = '{prompts}@[20:]': the slice is empty: the file has 9 rows" in line
    line = refused(myxo, "up", config, "--prompt-data", prompts, tmp_path / "none.jsonl")
    assert f"--prompt-data (data.prompt_data) = '{tmp_path}/none.jsonl': no such file" in line
    assert "the weight 0.01 of 9 prompts rounds to none" in refused(myxo, "up", config, "--prompt-data", f"{prompts}*0.01")
    assert "demonstrations are all used, each once" in refused(myxo, "up", config, "--eval-prompt-data", f"{heldout}*2")
    write_jsonl(other := tmp_path / "other.jsonl", [*PROMPTS[:2], {"prompt": "1+1="}])
    assert f"{other}:3" in refused(myxo, "up", config, "--prompt-data", prompts, f"{other}@[-1:]")


def test_parquet_that_cannot_be_read_and_a_row_that_does_not_fit(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    path.write_bytes(b"PAR1, but not really")
    line = refused(myxo, "up", config_file(), "--prompt-data", path)
    assert f"--prompt-data (data.prompt_data) = '{path}': not a readable Parquet file" in line
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["1+1=", "1+2="], "label": ["2", None]}), path)
    line = refused(myxo, "up", config_file(), "--prompt-data", path)
    assert "data.prompt_data:label" in line
    assert f"{path}:2" in line


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


def test_a_data_source_that_is_not_there(myxo: Myxo, config_file: ConfigFile) -> None:
    line = refused(myxo, "up", config_file(), "--data-source", "no_such_package.prompts:make")
    assert "--data-source (data.data_source) = 'no_such_package.prompts:make': cannot be imported" in line
    assert "data.data_source" in refused(myxo, "up", config_file(), "--data-source", "no_such_package.prompts")


def test_agents_that_cannot_play(myxo: Myxo, config_file: ConfigFile) -> None:
    line = refused(myxo, "up", config_file(), "--agent", "tests.support.agents:two_arguments")
    assert "(rollout.agent) = 'tests.support.agents:two_arguments': expected a function of (data, base_url, api_key)" in line
    line = refused(myxo, "up", config_file(), "--agent-command", "no-such-agent --steps 3")
    assert "(rollout.agent_command) = ['no-such-agent', '--steps', '3']: a program that this machine has" in line


def test_functions_that_are_not_there(myxo: Myxo, config_file: ConfigFile) -> None:
    good = ("--custom-generate-function-path", "tests.support.generate_hooks:two_turns", "--dynamic-sampling-filter-path", "nonzero_std")
    line = refused(myxo, "up", config_file(), *good, "--custom-rm-path", "tests.support.reward_hooks:absent")
    assert "--custom-rm-path (reward.custom_rm_path) = 'tests.support.reward_hooks:absent': cannot be imported" in line
    assert "name a function that is in it" in line
    assert "--custom-rm-path (reward.custom_rm_path) = 'tests.support.reward_hooks'" in refused(
        myxo, "up", config_file(), "--custom-rm-path", "tests.support.reward_hooks"
    )


def test_an_unknown_key(myxo: Myxo, config_file: ConfigFile) -> None:
    line = refused(myxo, "up", config_file(rollout={"rollout_batchsize": 4}))
    assert "rollout.rollout_batchsize = 4: unknown key; did you mean rollout_batch_size?" in line


def test_an_unknown_flag(myxo: Myxo, config_file: ConfigFile) -> None:
    line = refused(myxo, "up", config_file(), "--rollout-batchsize", "4")
    assert "did you mean --rollout-batch-size?" in line


def test_a_model_that_is_not_there(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    line = refused(myxo, "up", config_file(model={"hf_checkpoint": tmp_path / "nowhere"}))
    assert f"model.hf_checkpoint = '{tmp_path}/nowhere': no such directory" in line


def test_no_samples_in_a_group(myxo: Myxo, config_file: ConfigFile) -> None:
    line = refused(myxo, "up", config_file(rollout={"n_samples_per_prompt": 0}))
    assert "rollout.n_samples_per_prompt = 0: input should be greater than 0" in line


def test_no_samples_in_a_group_by_flag(myxo: Myxo, config_file: ConfigFile) -> None:
    assert "--n-samples-per-prompt (rollout.n_samples_per_prompt) = '0'" in refused(
        myxo, "up", config_file(), "--n-samples-per-prompt", "0"
    )


def test_an_environment_that_the_run_does_not_have(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file()
    line = refused(myxo, "up", config, "--rm-type", "graderr", "--environments", "{'grader': 'nats:grader'}")
    assert "--rm-type (reward.rm_type) = 'graderr': no such verifier or environment; did you mean grader?" in line
    assert "reward.environment_url = None: required with rm_type = environment" in refused(myxo, "up", config, "--rm-type", "environment")
    write_jsonl(tmp_path / "prompts.jsonl", [*PROMPTS[:2], {**PROMPTS[2], "metadata": {"rm_type": "deep_scaler"}}])
    line = refused(myxo, "up", config)
    assert "data.prompt_data:metadata.rm_type" in line
    assert f"{tmp_path}/prompts.jsonl:3" in line
    assert "did you mean deepscaler?" in line


def test_a_config_that_is_not_there(myxo: Myxo, tmp_path: Path) -> None:
    assert "CONFIG" in refused(myxo, "up", tmp_path / "absent.toml")


@pytest.mark.parametrize("command", ["up", "status"])
def test_a_nats_url_that_nobody_answers(myxo: Myxo, config_file: ConfigFile, command: str, tmp_path: Path) -> None:
    port = free_port()
    line = refused(
        myxo, command, config_file() if command == "up" else "tiny", environment={"NATS_URL": f"nats://me:hush@127.0.0.1:{port}"}
    )
    assert f"NATS_URL = 'nats://127.0.0.1:{port}'" in line
    assert "give nats://[user:password@]host:port" in line
    assert "hush" not in line
    assert not (tmp_path / "runs").exists(), "nothing is left of a launch that never was"


@pytest.mark.parametrize("url", ["localhost", "http://127.0.0.1:1", "nats://", "nats://127.0.0.1:port"])
def test_a_nats_url_that_is_none(myxo: Myxo, config_file: ConfigFile, url: str) -> None:
    assert "NATS_URL" in refused(myxo, "up", config_file(), environment={"NATS_URL": url})


def test_submit_needs_both_servers(myxo: Myxo, config_file: ConfigFile) -> None:
    assert "NATS_URL = None: required" in refused(myxo, "submit", config_file())
    given = {"NATS_URL": f"nats://127.0.0.1:{free_port()}"}
    assert "REDIS_URL = None: required" in refused(myxo, "submit", config_file(), environment=given)


def test_a_redis_url_that_nobody_answers(myxo: Myxo, config_file: ConfigFile) -> None:
    line = refused(myxo, "up", config_file(), environment={"REDIS_URL": "redis://:hush@127.0.0.1:1"})
    assert "REDIS_URL = 'redis://127.0.0.1:1'" in line
    assert "hush" not in line


def test_a_redis_url_that_is_none(myxo: Myxo, config_file: ConfigFile) -> None:
    assert "REDIS_URL" in refused(myxo, "up", config_file(), environment={"REDIS_URL": "localhost"})


@pytest.mark.parametrize("command", ["status", "audit", "summary", "logs"])
def test_a_run_that_is_not_there(myxo: Myxo, tmp_path: Path, command: str) -> None:
    (tmp_path / "arithmetic" / "logs").mkdir(parents=True)
    line = refused(myxo, command, "arithmetik", "--dir", tmp_path)
    assert "did you mean arithmetic?" in line


def test_an_error_stays_one_line_however_long_the_prompt(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    config = config_file()
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": ["x\ny" * 5000], "label": "2"}])
    assert len(refused(myxo, "up", config)) < 1200


def test_a_flag_of_megatrons_that_there_is_not(myxo: Myxo, config_file: ConfigFile) -> None:
    line = refused(myxo, "up", config_file(), "--moe-router-dtyp", "fp32")
    assert "--moe-router-dtyp = '': unknown flag; did you mean --moe-router-dtype?" in line
    assert "--train-iters = '9': use num_rollout" in refused(myxo, "up", config_file(), "--train-iters", "9")


def test_the_config_that_would_run_is_printed(myxo: Myxo, config_file: ConfigFile, tmp_path: Path) -> None:
    words = (
        "--num-rollout",
        "10",
        "--dry-run",
        "--print-config",
        "--sglang-mem-fraction-static",
        "0.5",
        "--no-rope-fusion",
        "--num-layers",
        "2",
    )
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
