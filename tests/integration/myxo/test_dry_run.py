"""What a dry run and a printed config say: the steps of epochs, values that are hardly meant, halves of a run, names on the hub."""

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shared.config.config_reading import parse
from shared.process.embedded_servers import free_port
from shared.schema.versions import is_periodic
from tests.integration.myxo.command import Myxo
from tests.integration.myxo.mistakes import Input
from tests.support.hub_server import HubServer
from tests.support.run_config import PROMPTS, write_jsonl


@pytest.fixture
def seven_rows(given: Input) -> Input:
    del given.sections["rollout"]["num_rollout"]
    write_jsonl(given.directory / "prompts.jsonl", [PROMPTS[index % len(PROMPTS)] for index in range(7)])
    return given


def settled(seven_rows: Input, myxo: Myxo, *flags: str) -> dict[str, Any]:
    """The resolved [rollout]."""
    code, printed, err = myxo.run("up", seven_rows.write(), "--print-config", *flags)
    assert code == 0, err
    parse(tomllib.loads(printed))  # what is printed is a config again
    rollout: dict[str, Any] = tomllib.loads(printed)["rollout"]
    return rollout


def test_epochs_are_whole_batches_of_the_prompts(seven_rows: Input, myxo: Myxo) -> None:
    rollout = settled(seven_rows, myxo, "--num-epoch", "3")  # 7 prompts in batches of 2: 3 steps, and a prompt is left over
    assert (rollout["num_rollout"], rollout["num_rollout_per_epoch"], rollout["num_epoch"]) == (9, 3, 3)


def test_prompts_that_are_left_out_do_not_count(seven_rows: Input, myxo: Myxo) -> None:
    long = {"prompt": "7+7=" * 100, "label": "14"}
    write_jsonl(seven_rows.directory / "prompts.jsonl", [*PROMPTS[:4], long, long, long, long])
    flags = ("--num-epoch", "2", "--rollout-max-prompt-len", "40", "--overlong-prompts", "filter")
    assert settled(seven_rows, myxo, *flags)["num_rollout"] == 4
    assert settled(seven_rows, myxo, "--num-epoch", "2")["num_rollout"] == 8


def test_an_epoch_has_each_files_prompts_as_often_as_its_weight_says(seven_rows: Input, myxo: Myxo) -> None:
    files = [f"{seven_rows.directory / 'prompts.jsonl'}@[:4]*2", f"{seven_rows.directory / 'prompts.jsonl'}@[4:]*1"]  # 4 twice, 3 once
    rollout = settled(seven_rows, myxo, "--num-epoch", "2", "--prompt-data", *files)
    assert (rollout["num_rollout"], rollout["num_rollout_per_epoch"]) == (10, 5)


def test_a_number_of_steps_wins(seven_rows: Input, myxo: Myxo) -> None:
    rollout = settled(seven_rows, myxo, "--num-epoch", "3", "--num-rollout", "5")
    assert rollout["num_rollout"] == 5
    assert "num_rollout_per_epoch" not in rollout


def test_epochs_that_do_not_count_are_told(seven_rows: Input, myxo: Myxo) -> None:
    told = "rollout.num_epoch: without effect, as this needs num_rollout left out"
    code, _, err = myxo.run("up", seven_rows.write(), "--print-config", "--num-epoch", "3", "--num-rollout", "5")
    assert code == 0 and told in err
    code, printed, err = myxo.run("up", seven_rows.write(), "--print-config", "--num-epoch", "3")
    assert code == 0 and "without effect" not in err
    (seven_rows.directory / "again.toml").write_text(printed)  # both are in it, and agree
    code, _, err = myxo.run("up", seven_rows.directory / "again.toml", "--print-config")
    assert code == 0 and "without effect" not in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ((), ("rollout.num_rollout", "or num_epoch")),
        (("--num-epoch", "2", "--rollout-batch-size", "8"), ("rollout.num_epoch", "7 are fewer than rollout_batch_size = 8")),
        (("--num-epoch", "0"), ("rollout.num_epoch", "greater than 0")),
        (("--num-epoch", "2", "--data-source", "tests.support.prompt_source:Sums"), ("rollout.num_epoch", "data_source")),
    ],
)
def test_what_gives_no_steps_is_refused(seven_rows: Input, myxo: Myxo, flags: tuple[str, ...], says: tuple[str, ...]) -> None:
    code, _, error = myxo.run("up", seven_rows.write(), "--print-config", *flags)
    assert code == 2 and [word for word in says if word not in error] == [], error


def test_intervals_that_do_not_fit_are_said(seven_rows: Input, myxo: Myxo) -> None:
    flags = ["--num-rollout", "12", "--eval-interval", "4", "--save-interval", "4", "--save-hf", "out/{rollout_id}", "--save-hf-interval"]
    code, _, error = myxo.run("up", seven_rows.write(), "--print-config", *flags, "6", "--update-weights-interval", "3")
    assert code == 0, error
    for line in (
        "eval_interval = 4 is no multiple of update_weights_interval = 3: what is due in between waits for the next version",
        "save_hf_interval = 6 is no multiple of save_interval = 4: what is due in between waits for the next checkpoint",
    ):
        assert line in error
    code, _, error = myxo.run("up", seven_rows.write(), "--print-config", *flags, "8", "--update-weights-interval", "2")
    assert code == 0 and "no multiple" not in error


def test_an_epoch_is_saved_and_evaluated_at_its_end() -> None:
    assert [steps for steps in range(1, 13) if is_periodic(steps, 4)] == [4, 8, 12]
    assert [steps for steps in range(1, 13) if is_periodic(steps, 4, 5)] == [4, 5, 8, 10, 12]


ODD = [
    (
        "--answer-pattern x --rm-type environment --environment-url http://127.0.0.1:1",
        "reward.answer_pattern: without effect, as this needs a verifier",
    ),
    ("--lr 2e-3", "trainer.lr = 0.002: above 1e-3"),
    ("--eps-clip 1.5", "algorithm.eps_clip = 1.5: above 1"),
    ("--use-kl-loss --kl-loss-coef 20", "algorithm.kl_loss_coef = 20: above 10"),
    ("--reward-timeout 90000", "reward.reward_timeout = 90000: seconds, more than a day"),
    ("--rollout-batch-size 12", "rollout.rollout_batch_size = 12: more than there are prompts"),
    ("--apply-chat-template --rollout-max-response-len 1", "rollout.rollout_max_response_len = 1: fewer tokens than the chat template"),
    ("--rollout-temperature 3", "rollout.rollout_temperature = 3: above 2"),
    ("--lr-warmup-iters 4", "trainer.lr_warmup_iters = 4: as many optimizer steps as the run has"),
]


@pytest.mark.parametrize(("flags", "said"), ODD)
def test_an_odd_value_is_noted(flags: str, said: str, given: Input, myxo: Myxo) -> None:
    (given.model / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}+{{ m.content }}=={% endfor %}{% if add_generation_prompt %}assistant+{% endif %}"
    )
    code, out, err = myxo.run("up", given.write(), "--dry-run", *flags.split())
    assert code == 0 and said in err, err
    heads = [line.split()[0] for line in out.splitlines()]
    assert heads == ["run", "model", "layout", "memory", "data", "a", "reward", "functions", "guessed", "problems"], out
    assert f"none; notes above: {err.count('myxo: ')}" in out
    assert "at most" in out and "samples" in out
    assert not (given.directory / "runs").exists()


@pytest.fixture
def four_dumps(given: Input) -> Input:
    for step in range(4):
        (given.directory / f"dump_{step}.pt").touch()
    return given


def test_training_on_dumps_asks_for_no_prompts_and_no_engine(four_dumps: Input, myxo: Myxo) -> None:
    (four_dumps.directory / "prompts.jsonl").unlink()
    (four_dumps.directory / "heldout.jsonl").unlink()
    dumps = ("--load-debug-rollout-data", str(four_dumps.directory / "dump_{rollout_id}.pt"))
    assert myxo.dry_run(four_dumps.write(), *dumps, "--sglang-attention-backend", "fa3") == (0, "")
    code, error = myxo.dry_run(four_dumps.write(), *dumps, "--num-rollout", "6")
    assert code == 2 and "each step from 0 to 5" in error and "dump_4.pt" in error
    code, error = myxo.dry_run(four_dumps.write(), *dumps, "--advantage-estimator", "ppo")
    assert code == 2 and "algorithm.advantage_estimator" in error and "critic" in error
    code, error = myxo.dry_run(four_dumps.write())
    assert code == 2 and "data.prompt_data" in error


def test_generating_alone_asks_nothing_of_a_trainer(four_dumps: Input, myxo: Myxo) -> None:
    training = ("--only-train-params-name-list", "nothing.of.this.name")
    code, error = myxo.dry_run(four_dumps.write(), *training)
    assert code == 2 and "only_train_params_name_list" in error
    assert myxo.dry_run(four_dumps.write(), *training, "--debug-rollout-only", "--colocate") == (0, "")


def test_a_warm_start_that_is_left_out_is_told(four_dumps: Input, myxo: Myxo) -> None:
    (four_dumps.directory / "sft.jsonl").write_text('{"prompt": "1+1=", "response": "2"}\n')
    code, error = myxo.dry_run(four_dumps.write(), "--debug-rollout-only", "--sft-data", str(four_dumps.directory / "sft.jsonl"))
    assert code == 0
    assert "the warm start of [sft] is left out" in error


ConfigFile = Callable[..., Path]

NAMED = {"model": {"hf_checkpoint": "org/model"}, "data": {"prompt_data": "hf:org/sums:train@[1:]"}}


@pytest.fixture
def hub(tmp_path: Path, tiny_model: Path, myxo: Myxo, config_file: ConfigFile) -> Iterator[HubServer]:
    """A hub with the tiny model and the tests' sums, which the command line uses."""
    with HubServer() as server:
        server.commit("models", "org/model", {path.name: path.read_bytes() for path in tiny_model.iterdir()})
        config_file()
        server.commit("datasets", "org/sums", {"train.jsonl": (tmp_path / "prompts.jsonl").read_bytes()})
        myxo.environment = {key: value for key, value in myxo.environment.items() if not key.startswith("HF_")}
        myxo.environment |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": server.url}
        yield server


def test_a_run_keeps_the_commits_that_it_began_with(myxo: Myxo, config_file: ConfigFile, hub: HubServer, tmp_path: Path) -> None:
    config = config_file(**NAMED)
    code, shown, err = myxo.run("up", config, "--print-config")
    assert code == 0, err
    first = tomllib.loads(shown)
    assert first["model"]["hf_checkpoint"].startswith("hf:org/model@main=")
    assert first["data"]["prompt_data"][0].startswith("hf:org/sums@main=")
    assert first["data"]["prompt_data"][0].endswith(":train@[1:]")
    assert not (tmp_path / "runs").exists()
    code, out, err = myxo.run("up", config, standins=True)
    assert code == 0, f"{out}\n{err}"

    hub.commit("models", "org/model", {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b""})
    hub.commit("datasets", "org/sums", {"train.jsonl": b"{}\n"})
    hub.asked.clear()
    code, shown, err = myxo.run("up", config, "--print-config")
    assert (code, tomllib.loads(shown)) == (0, first), err
    assert hub.asked == []
    code, _, err = myxo.run("up", config, "--dry-run", "--fresh")
    assert code == 2
    assert "model.hf_checkpoint" in err


def test_names_without_a_network(myxo: Myxo, config_file: ConfigFile, hub: HubServer) -> None:
    config = config_file(**NAMED)
    code, out, err = myxo.run("up", config, environment={"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"})
    assert (code, out, len(err.splitlines())) == (2, "", 2), err
    assert "model.hf_checkpoint = 'hf:org/model'" in err
    assert "cannot be reached" in err


def test_a_plan_downloads_no_weights(myxo: Myxo, config_file: ConfigFile, hub: HubServer, tmp_path: Path) -> None:
    config = config_file(**NAMED)
    code, out, err = myxo.run("plan", config, "--gpu-memory", "80")
    assert code == 0 and "It fits." in out, err
    assert not [path for path in (tmp_path / "hf").rglob("*") if path.name.endswith((".safetensors", ".jsonl"))]
    code, _, err = myxo.run(
        "plan", config, environment={"HF_ENDPOINT": f"http://127.0.0.1:{free_port()}", "HF_HOME": str(tmp_path / "other")}
    )
    assert code == 2 and "model.hf_checkpoint = 'hf:org/model'" in err and "give a directory" in err
