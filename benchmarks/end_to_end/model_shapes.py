"""Checkpoints with random weights of a given shape, and a tokenizer of as many words as the model has ids."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Of Qwen3's models of that size, and of one that a CPU draws from."""

COMMON: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
}

SPECIAL = ("<pad>", "<eos>", "<unknown>")
"""The ids 0, 1 and 2; word ``wK`` has the id K from 3 on."""

SHARD_BYTES = 4 << 30


def config_of(shape: str, dtype: str) -> dict[str, Any]:
    """Returns the content of a checkpoint's config.json."""
    return {**COMMON, **SIZES[shape], "torch_dtype": dtype}


def write_checkpoint(folder: Path, shape: str, dtype: str) -> int:
    """Writes a checkpoint directory; returns its number of parameters. A process of its own does it, which holds the GPU no longer."""
    command = [sys.executable, "-m", "benchmarks.end_to_end.model_shapes", str(folder), shape, dtype]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=True, stdout=subprocess.PIPE)
    return int(done.stdout.split()[-1])


def _write(folder: Path, shape: str, dtype: str, seed: int = 0) -> int:
    """Does it. The same arguments give the same weights on the same device."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, dtype)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "pad_token_id": 0}))
    _tokenizer(config["vocab_size"]).save_pretrained(folder)
    with torch.device("meta"):
        names = Qwen3ForCausalLM(Qwen3Config(**config)).state_dict()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = count = 0
    for name, like in names.items():
        if config["tie_word_embeddings"] and name == "lm_head.weight":
            continue
        if name.endswith("norm.weight"):
            tensor = torch.ones(like.shape, dtype=getattr(torch, dtype))
        else:
            drawn = torch.randn(like.shape, device=device, generator=generator) * config["initializer_range"]
            tensor = drawn.to(getattr(torch, dtype)).cpu()
        if size > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size, count = size + tensor.nbytes, count + tensor.numel()
    files = [f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" for index in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, folder / file, metadata={"format": "pt"})
    index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return count


def _tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {name: index for index, name in enumerate(SPECIAL)} | {f"w{index}": index for index in range(len(SPECIAL), vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token=SPECIAL[2]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], eos_token=SPECIAL[1], unk_token=SPECIAL[2], clean_up_tokenization_spaces=False
    )


if __name__ == "__main__":
    print(_write(Path(sys.argv[1]), *sys.argv[2:]))
