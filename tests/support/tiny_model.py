"""A tiny randomly initialised Qwen3 checkpoint with a character-level tokenizer, written locally.

Everything that a Hugging Face checkpoint directory holds is made here, so no test needs the network: ``config.json``,
``generation_config.json``, ``model.safetensors``, ``tokenizer.json``, ``tokenizer_config.json`` with a chat template.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))
"""Newline and printable ASCII: the default alphabet, 96 characters."""

PAD, EOS, START, UNKNOWN = "<|pad|>", "<|im_end|>", "<|im_start|>", "<|unk|>"
"""The special tokens; they take the ids 0, 1, 2, 3 in this order, the alphabet follows from 4 on."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinyModelShape:
    """Sizes of a tiny model. The defaults give about 0.1 M parameters.

    Args:
        weight_std: standard deviation of every weight matrix. Hugging Face's 0.02 leaves the output nearly uniform;
            0.1 makes two seeds differ by whole nats per token while fp32 stays exact to about 1e-6.
        vocab_multiple: the embedding is padded up to a multiple of this many rows; padded ids are never decoded.
    """

    hidden_size: int = 64
    intermediate_size: int = 128
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    max_positions: int = 1024
    tie_embeddings: bool = False
    weight_std: float = 0.1
    vocab_multiple: int = 1


def character_tokenizer(alphabet: str = PRINTABLE) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of ``alphabet``; any other character becomes ``<|unk|>``.

    Returns:
        A fast tokenizer with pad, eos and chat template set; decoding joins characters without spaces.
    """
    if len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet holds a character twice: {alphabet!r}")
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, START, UNKNOWN, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_qwen3(seed: int, vocab_size: int, shape: TinyModelShape | None = None) -> Qwen3ForCausalLM:
    """A Qwen3 of ``shape`` in float32, in eval mode, its weights drawn from ``seed`` alone."""
    shape = shape or TinyModelShape()
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        tie_word_embeddings=shape.tie_embeddings,
        initializer_range=shape.weight_std,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.data.add_(torch.randn_like(parameter) * shape.weight_std)
    return model


def write_tiny_model(path: Path, *, seed: int = 0, shape: TinyModelShape | None = None, alphabet: str = PRINTABLE) -> Qwen3ForCausalLM:
    """Write a checkpoint directory and return the model that was written.

    Args:
        path: directory, made if missing. seed: of the weights. shape: sizes. alphabet: characters of the tokenizer.

    Returns:
        The float32 model in eval mode: the reference that an engine serving ``path`` must agree with.
    """
    shape = shape or TinyModelShape()
    tokenizer = character_tokenizer(alphabet)
    vocab_size = -(-len(tokenizer) // shape.vocab_multiple) * shape.vocab_multiple
    model = tiny_qwen3(seed, vocab_size, shape)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return model
