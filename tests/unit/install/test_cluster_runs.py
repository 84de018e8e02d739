"""The runs of `deploy/kubernetes`, checked as `myxo submit` checks them, planned, and placed on as many nodes as their names say.

The models are of their real shapes; their files hold headers and no bytes.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from myxo.commands.plan import planned
from myxo.launch.node_placement import place
from myxo.preflight import Source, checked_config
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
