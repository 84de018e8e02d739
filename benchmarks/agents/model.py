"""The models that are drawn from where none is given: Qwen3 with random weights, a tokenizer of characters and Qwen3's chat form."""

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from tests.support.qwen3_tokenizer import write_qwen3_tokenizer
from tests.support.tiny_model import TinyModelShape, tiny_qwen3

CONTEXT = 16384

SHAPES = {
    "tiny": TinyModelShape(max_positions=CONTEXT),
    "0.6B": TinyModelShape(1024, 3072, 28, 16, 8, 128, CONTEXT, tie_embeddings=True, weight_std=0.02),
}
"""By name: two layers of 64 hidden units, and the shape of Qwen3-0.6B but for the vocabulary."""


def write_model(path: Path, shape: str) -> Path:
    """Writes a checkpoint directory; returns it. The same shape gives the same weights."""
    write_qwen3_tokenizer(path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
    model = tiny_qwen3(0, -(-len(tokenizer) // 64) * 64, SHAPES[shape])
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, 0
    model.save_pretrained(path)
    return path
