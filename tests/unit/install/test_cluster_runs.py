"""Runs of `deploy/kubernetes` and `deploy/slurm`, by those who can read them without a cluster."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from myxo.commands.plan import planned
from myxo.launch.node_placement import place
from myxo.preflight import Source, checked_config
from myxo.run.run_directory import RunDirectory
from shared.model.families import read_architecture
from shared.model.tensor_table import hf_tensors
from tests.support.run_config import write_jsonl
from tests.support.tiny_model import character_tokenizer

ROOT = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
GPU = 80_000_000_000
SHARD_BYTES = 4 << 30
QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {**QWEN3, "model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8},
    "Qwen3-235B-A22B": {
        **QWEN3,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
}
SIZES = {"gpu-2x8": 2, "gpu-32x8": 32, "gpu-32x8-wide": 32}


def write_hollow(directory: Path, shape: dict[str, Any]) -> None:
    """Writes a checkpoint of a shape, with a tokenizer; of its weights the file has room alone."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(shape))
    character_tokenizer().save_pretrained(directory)
    files: list[dict[str, Any]] = []
    end = SHARD_BYTES
    for name, sizes in hf_tensors(read_architecture(directory)).items():
        if end >= SHARD_BYTES:
            files, end = [*files, {}], 0
        first, end = end, end + 2 * math.prod(sizes)
        files[-1][name] = {"dtype": "BF16", "shape": list(sizes), "data_offsets": [first, end]}
    names = {f"model-{index}.safetensors": header for index, header in enumerate(files)}
    held = {tensor: name for name, header in names.items() for tensor in header}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": held}))
    for name, header in names.items():
        encoded = json.dumps(header).encode()
        with (directory / name).open("wb") as file:
            file.write(struct.pack("<Q", len(encoded)) + encoded)
            file.truncate(8 + len(encoded) + max(tensor["data_offsets"][1] for tensor in header.values()))


@pytest.fixture(params=SIZES)
def overlay(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All models, and the data."""
    made = tmp_path_factory.mktemp("cluster")
    for name, shape in SHAPES.items():
        write_hollow(made / name, shape)
    write_jsonl(made / "prompts.jsonl")
    return made


@pytest.fixture
def source(overlay: str, directory: Path) -> Source:
    """The overlay's run, with model and data where the test has put them."""
    path = ROOT / overlay / "run.toml"
    [model] = [name for name in SHAPES if f'/{name}"' in path.read_text()]
    return Source.of(path, ["--hf-checkpoint", str(directory / model), "--prompt-data", str(directory / "prompts.jsonl")])


def test_a_run_passes_the_checks_fits_and_fills_its_cluster(overlay: str, source: Source) -> None:
    config = checked_config(source)
    rollout, trainer = config.rollout, config.trainer
    assert planned(source, GPU).plan.fits
    nodes, gpus = SIZES[overlay], trainer.ranks("actor") + rollout.rollout_replicas * rollout.rollout_num_gpus_per_engine
    assert gpus == nodes * 8, "idle GPUs"
    placed = [service for service in place(config, nodes, 8) if service.gpus]
    assert sorted((service.node, gpu) for service in placed for gpu in service.gpus) == [
        (node, gpu) for node in range(nodes) for gpu in range(8)
    ]


# --- `deploy/slurm/run.sbatch` by those who can read it without a cluster; tests/integration/cluster runs it

SCRIPT = Path(__file__).resolve().parents[3] / "deploy" / "slurm" / "run.sbatch"


@pytest.mark.parametrize("reader", [("bash", "-n"), ("shellcheck",)], ids=lambda words: words[0])
def test_it_is_a_sound_script(reader: tuple[str, ...]) -> None:
    if shutil.which(reader[0]) is None:
        pytest.skip(f"no {reader[0]} here")
    read = subprocess.run([*reader, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stdout + read.stderr


def test_sbatch_reads_its_options_before_the_first_command() -> None:
    lines = SCRIPT.read_text().splitlines()
    options = [index for index, line in enumerate(lines) if line.startswith("#SBATCH")]
    first = next(index for index, line in enumerate(lines) if line and not line.startswith("#"))
    assert options and max(options) < first


def ran(words: str, **environment: object) -> subprocess.CompletedProcess[str]:
    """Runs words of bash with the script's functions."""
    functions = SCRIPT.read_text().rpartition("export MYXO_PYTHON=")[0]
    given = {**os.environ, "MYXO_PYTHON": sys.executable, **{name: str(value) for name, value in environment.items()}}
    return subprocess.run(["bash", "-c", f"{functions}\n{words}"], capture_output=True, text=True, env=given, timeout=120, check=False)


def test_the_trainer_has_the_seconds_that_are_given_for_its_checkpoint() -> None:
    assert [ran('echo "$SAVE_SECONDS"', **given).stdout for given in ({}, {"MYXO_SAVE_SECONDS": 900})] == ["120\n", "900\n"]


def test_services_of_a_node_share_no_port(tmp_path: Path) -> None:
    words = 'keep() { echo "$MYXO_HTTP"; }; service 0 buffer buffer-0 - services.buffer; service 0 reward reward-0 - services.reward'
    assert ran(words, MYXO_HTTP="0.0.0.0:9464", MYXO_STATE=tmp_path).stdout.split() == ["0.0.0.0:0"] * 2


def test_a_second_job_of_a_run_is_refused_as_long_as_the_first_one_goes_on(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 7")  # as an earlier command left it
    first = "hold; bash -c 'exec 9>&-; (hold) && exit 1; exit 0'; code=$?; echo began; exit $code"
    done = ran(f"export -f hold say; {first}", MYXO_ROOT=tmp_path, SLURM_JOB_ID=12)
    assert (done.returncode, done.stdout) == (0, "began\n") and f"{tmp_path} is in use by job 12" in done.stderr
    assert ran("hold; echo began", MYXO_ROOT=tmp_path, SLURM_JOB_ID=13).stdout == "began\n"
    assert ran("flock() { return 71; }; hold; echo began", MYXO_ROOT=tmp_path).stdout == "began\n", "a file system without locks"
    with RunDirectory(tmp_path).held():
        assert ran("hold; echo began", MYXO_ROOT=tmp_path).returncode == 2
    looking = "(flock --shared 8; sleep 0.3) 8<$MYXO_ROOT/lock & until ! flock --nonblock $MYXO_ROOT/lock true; do :; done"
    assert ran(f"{looking}; hold; echo began", MYXO_ROOT=tmp_path).stdout == "began\n", "beside a command that looks at the lock"


def test_servers_that_were_given_up_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("redis://127.0.0.1:1")
    (tmp_path / "stop").write_text("nats-server ended 6 times in a row")
    assert ran(f"answers 127.0.0.1:1 {tmp_path}/url", MYXO_STATE=tmp_path).returncode == 3
