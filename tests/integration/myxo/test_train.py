"""Commands that print and write: `myxo train --print-config`, ``myxo init``, whose config can be run, and ``myxo completion``."""

import json
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from myxo.main import main
from shared.config import config_reading
from shared.config.eval_views import eval_views
from tests.integration.myxo.command import Myxo
from tests.support.run_config import write_jsonl


@pytest.fixture
def words(tmp_path: Path, tiny_model: Path) -> list[str]:
    """A command line as a script of slime's has it."""
    prompts = write_jsonl(tmp_path / "prompts.jsonl")
    given = f"""
        --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --hf-checkpoint {tiny_model}
        --ref-load {tmp_path}/tiny_torch_dist --load {tmp_path}/saved --save {tmp_path}/saved
        --prompt-data {prompts}@[-6:] --input-key prompt --label-key label --rollout-shuffle
        --rm-type math --num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 2 --global-batch-size 2 --rollout-max-response-len 16
        --balance-data --use-dynamic-batch-size --max-tokens-per-gpu 64 --advantage-estimator grpo --use-kl-loss --kl-loss-type low_var_kl
        --optimizer adam --lr 1e-6 --lr-decay-style constant --optimizer-cpu-offload --attention-backend flash --wandb-key s3cret --lr 1e-5
    """
    return given.split()


def test_it_prints_the_config_that_it_stands_for_and_tells_what_became_of_each_flag(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "before")  # so that it is put back
    assert main(["train", *words, "--print-config"]) == 0
    printed, told = capsys.readouterr()
    values = tomllib.loads(printed)
    assert values["run"]["dir"] == str(tmp_path / "saved")
    assert values["data"]["prompt_data"] == [f"{tmp_path}/prompts.jsonl@[-6:]"]
    assert (values["trainer"]["num_steps_per_rollout"], values["trainer"]["lr"]) == (2, 1e-5)
    for line in (
        "--balance-data changes nothing: batches are always balanced",
        "--ref-load",
        "--lr is given twice: 1e-5 counts, the last",
        "--wandb-key is WANDB_API_KEY",
        "slime's defaults hold where they differ",
    ):
        assert told.count(line) == 1, told
    assert "s3cret" not in printed + told
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    for command in (["up", str(file)], ["train", str(file)]):
        assert main([*command, "--print-config"]) == 0
        assert capsys.readouterr().out == printed


def test_demonstrations_alone_are_trained_for_their_epochs(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chats = [{"messages": [{"role": "user", "content": f"{n}+1="}, {"role": "assistant", "content": str(n + 1)}]} for n in range(9)]
    data = write_jsonl(tmp_path / "chats.jsonl", chats)
    model = words[words.index("--hf-checkpoint") + 1]
    given = f"""
        --hf-checkpoint {model} --prompt-data {data} --input-key messages --rollout-function-path slime.rollout.sft_rollout.generate_rollout
        --num-epoch 3 --rollout-batch-size 4 --global-batch-size 4 --loss-type sft_loss --calculate-per-token-loss --debug-train-only
        --disable-compute-advantages-and-returns --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-fraction 0.5
        --save {tmp_path}/saved
    """
    assert main(["train", *given.split(), "--print-config"]) == 0, capsys.readouterr().err
    sft = tomllib.loads(capsys.readouterr().out)["sft"]
    assert (sft["sft_steps"], sft["sft_batch_size"], sft["sft_warmup_fraction"]) == (6, 4, 0.5)


@pytest.mark.extra
def test_the_reference_policy_may_have_a_checkpoint_of_its_own(
    words: list[str], tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "reference"
    shutil.copytree(tiny_model, own)
    place = words.index("--ref-load") + 1
    given = [*words[:place], str(own), *words[place + 1 :], "--print-config"]
    assert main(["train", *given]) == 0
    assert f"its reference from {own}; slime starts both from --ref-load" in capsys.readouterr().err
    other = {**json.loads((own / "config.json").read_text()), "num_attention_heads": 2, "tie_word_embeddings": True}
    (own / "config.json").write_text(json.dumps(other))
    assert main(["train", *given]) == 2
    [told] = capsys.readouterr().err.splitlines()
    assert f"--ref-load (model.ref_load) = '{own}': a model of the policy's shape" in told
    assert "num_attention_heads is 2, the policy's 4; tied_embeddings is True, the policy's False" in told


def test_everything_wrong_is_told_at_once(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["--balance-dat", "--sglang-config", "engines.yaml", "--rollout-max-respons", "3", "--print-config"]
    assert main(["train", *words, *wrong]) == 2
    told = capsys.readouterr().err
    for line in (
        "--balance-dat = '': unknown flag; did you mean --balance-data?",
        "did you mean --rollout-max-response-len?",
        "engines.yaml': no such file",
    ):
        assert line in told


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1=", "answer": n + 1}) + "\n" for n in range(300)))
    return path


def test_a_config_for_a_model_and_a_file(tmp_path: Path, tiny_model: Path, rows: Path, myxo: Myxo) -> None:
    path = tmp_path / "first.toml"
    words = ["init", tiny_model, rows, "-o", path, "--name", "first"]
    code, out, err = myxo.run(*words)
    assert code == 0, err
    assert f"myxo up {path}" in out
    config = config_reading.load(path)
    [trained], [held] = config.data.prompt_data or [], eval_views(config)[0].files
    assert (config.data.input_key, config.data.label_key, config.reward.rm_type) == ("question", "answer", "math_verify")
    assert (trained.path, len(trained.rows(300)), held.path, len(held.rows(300))) == (rows, 270, rows, 30)
    assert not set(trained.rows(300)) & set(held.rows(300))
    written = path.read_text()
    code, _, err = myxo.run(*words, "--rm-type", "exact")
    assert (code, path.read_text()) == (2, written)
    assert "--force" in err
    assert myxo.run(*words, "--rm-type", "exact", "--force")[0] == 0
    assert config_reading.load(path).reward.rm_type == "exact"


@pytest.mark.parametrize(("words", "field"), [(["/nowhere", None], "MODEL"), ([None, "/nowhere.jsonl"], "DATA")])
def test_what_is_not_there(tmp_path: Path, tiny_model: Path, rows: Path, myxo: Myxo, words: list[str | None], field: str) -> None:
    path = tmp_path / "first.toml"
    code, _, err = myxo.run("init", words[0] or tiny_model, words[1] or rows, "-o", path)
    assert (code, path.exists()) == (2, False)
    assert field in err


@pytest.fixture
def script(tmp_path: Path, myxo: Myxo) -> Path:
    code, out, _ = myxo.run("completion", "bash")
    assert code == 0
    path = tmp_path / "myxo.bash"
    path.write_text(out)
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["sta"], "status"), (["up", "--max-stal"], "--max-staleness"), (["audit", "--js"], "--json"), (["completion", "fi"], "fish")],
)
def test_bash_completes(script: Path, words: Sequence[str], expected: str) -> None:
    typed = f"COMP_WORDS=(myxo {' '.join(words)}); COMP_CWORD={len(words)}"
    asked = f'source {script}; {typed}; "$(complete -p myxo | sed "s/.* -F //; s/ .*//")" myxo; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run([shutil.which("bash") or "bash", "-c", asked], capture_output=True, text=True, timeout=60)
    assert expected in done.stdout.split(), done.stderr


@pytest.mark.parametrize("shell", ["zsh", "fish", "tcsh"])
def test_other_shells_get_a_script(myxo: Myxo, shell: str) -> None:
    code, out, _ = myxo.run("completion", shell)
    assert code == 0
    assert "myxo" in out
    assert "status" in out


def test_a_shell_that_is_not_known(myxo: Myxo) -> None:
    code, out, err = myxo.run("completion", "cmd")
    assert (code, out) == (2, "")
    assert "cmd" in err
