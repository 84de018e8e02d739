"""A tiny Qwen3 with random weights and a tokenizer of single characters, as a Hugging Face checkpoint."""

import json
import string
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

PAD, BOS, EOS, UNKNOWN = SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")
"""Their ids are 0 to 3."""
CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
VOCABULARY_MULTIPLE = 64
"""The embedding's rows are a multiple of this, as Megatron likes them for tensor parallelism."""
CONTEXT = 128
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
"""A chat is the plain text of its messages, answers with the token that ends them: this model knows no roles."""


def character_tokenizer() -> Tokenizer:
    """One token a character: printable ASCII and the newline; anything else is ``<unk>``. Adds no token of its own to a text."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_lines(path: Path, lines: Iterable[Mapping[str, object]]) -> None:
    """Writes prompts or demonstrations, one JSON object a line."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def save(folder: Path, *, seed: int, layers: int, hidden_size: int) -> int:
    """Writes config.json, model.safetensors, generation_config.json and the tokenizer's files.

    The standard deviation of the initial weights is 0.05, not the usual 0.02, which suits hundreds of hidden units less than thousands.

    Args:
        layers, hidden_size: of the model; heads have 32 channels, each KV head serves two of them.

    Returns the number of parameters.
    """
    tokenizer = character_tokenizer()
    pad, bos, eos, _ = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)
    rows = -(-tokenizer.get_vocab_size() // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    config = Qwen3Config(
        vocab_size=rows,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=pad,
        bos_token_id=bos,
        eos_token_id=eos,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(pad_token_id=pad, bos_token_id=bos, eos_token_id=eos)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    return sum(parameter.numel() for parameter in model.parameters())
