"""What a push is measured with: trainer ranks and engines on so many GPUs, and a model of random weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.trainer_mfu import SHAPE

if TYPE_CHECKING:
    from tests.support.pushing import Replicated


@dataclass(frozen=True)
class PushLayout:
    """Trainer ranks and engines on so many GPUs. ``parallel``: sizes of the trainer's; ``engine_gpus``: of each engine."""

    words: str
    ranks: int = 2
    engines: int = 1
    engine_gpus: int = 1
    parallel: Mapping[str, int] = field(default_factory=dict)


LAYOUTS = {
    2: {"tp1": PushLayout("TP1, 1 engine", ranks=1)},
    4: {
        "tp2": PushLayout("TP2, 2 engines", engines=2, parallel={"tensor_model_parallel_size": 2}),
        "pp2": PushLayout("PP2, 1 engine of TP2", engine_gpus=2, parallel={"pipeline_model_parallel_size": 2}),
    },
}
"""By the number of GPUs and a short name."""

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SHAPES = {"4b": {}, "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}}
"""What differs from Qwen3-4B's shape."""

ENGINE_FLAGS = {
    "load-format": "dummy",
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "mem-fraction-static": 0.4,
    "cuda-graph-max-bs-decode": 32,
    "disable-prefill-cuda-graph": True,
}


def write_push_model(model: Path, shape: str) -> None:
    """Writes a checkpoint without weights. ``shape``: of `SHAPES`, or ``small``."""
    from tests.support.tiny_model import character_tokenizer

    model.mkdir()
    character_tokenizer().save_pretrained(model)
    own = SMALL if shape == "small" else SHAPES[shape]
    (model / "config.json").write_text(json.dumps({**SHAPE, **own, "architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}))


def push_engines(directory: Path, model: Path, layout: PushLayout, device: str) -> "Replicated":
    """Returns the replicas of a layout, not started yet; one that comes back takes its weights from another. ``device``: cuda or cpu."""
    from tests.support.pushing import Replicated

    def gpus(number: int) -> dict[str, str]:
        first = layout.ranks + number * layout.engine_gpus
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(first, first + layout.engine_gpus)))} if device == "cuda" else {}

    flags = ENGINE_FLAGS if device == "cuda" else {"load-format": "dummy"}
    return Replicated(
        directory,
        model,
        replicas=layout.engines,
        environment=gpus,
        rollout={"rollout_device": device, "sglang": flags, "max_staleness": 1, "rollout_num_gpus_per_engine": layout.engine_gpus},
        trainer={"train_device": device},
        weights={"join_from": "peer"},
    )
