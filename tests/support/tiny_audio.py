"""A tiny random Qwen2-Audio, with the character tokenizer of `tests.support.tiny_model` and the files of its processor."""

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.qwen3_tokenizer import SPECIAL, TEMPLATE, write_qwen3_tokenizer
from tests.support.tiny_model import PRINTABLE, character_tokenizer
from tests.support.tiny_vision import randomize

AUDIO, BEGIN, END = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


PARTS = (  # with numbers, and by the key of a part alone, as Qwen2-Audio's own template has it
    "{%- set heard = namespace(count=0) %}"
    "{%- macro shown(content) %}{%- if content is string %}{{ content }}{%- else %}{%- for part in content %}{%- if 'audio' in part %}"
    "{%- set heard.count = heard.count + 1 %}{{ 'Audio ' ~ heard.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>' }}"
    "{%- else %}{{ part.text }}{%- endif %}{%- endfor %}{%- endif %}{%- endmacro %}"
)


def write_hearing_chat_model(path: Path) -> Any:
    """Writes a tiny Qwen2-Audio with the chat form of Qwen3, tools among it, and returns the float32 model."""
    model = write_tiny_audio_model(path, room=32)
    (path / "chat_template.jinja").unlink()
    template = PARTS + TEMPLATE.replace("message.content + '<|im_end|>", "shown(message.content) + '<|im_end|>")
    template = template.replace("'\\n<tool_response>\\n' + message.content +", "'\\n<tool_response>\\n' + shown(message.content) +")
    write_qwen3_tokenizer(path, template, [*SPECIAL, BEGIN, END, AUDIO])
    ids = {one["content"]: one["id"] for one in json.loads((path / "tokenizer.json").read_text())["added_tokens"]}
    config = json.loads((path / "config.json").read_text()) | {"audio_token_index": ids[AUDIO]}
    config["text_config"] |= {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}))
    model.config.audio_token_id = model.config.audio_token_index = ids[AUDIO]
    return model


def wav(seconds: float, pitch: float | None = None, rate: int = 16000, channels: int = 1, seed: int = 0) -> bytes:
    """Returns a WAV of 16 bits: a tone of so many Hz, or noise."""
    count = round(seconds * rate)
    times = np.arange(count) / rate
    waves = np.random.RandomState(seed).uniform(-0.5, 0.5, count) if pitch is None else 0.5 * np.sin(2 * np.pi * pitch * times)
    with wave.open(encoded := io.BytesIO(), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.repeat((waves * 32767).astype("<i2"), channels).tobytes())
    return encoded.getvalue()


def write_tiny_audio_model(
    path: Path, *, seed: int = 0, alphabet: str = PRINTABLE, std: float = 0.1, seconds: int = 4, room: int = 0
) -> Any:
    """Writes a checkpoint of the kind qwen2_audio, whose encoder hears so many ``seconds``, and returns the float32 model.

    ``room``: ids beyond those of the tokenizer."""
    tokenizer = character_tokenizer(alphabet)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", AUDIO, BEGIN, END]})
    tokenizer.chat_template = CHAT_TEMPLATE
    text = {
        "model_type": "qwen2", "vocab_size": len(tokenizer) + room, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": None, "eos_token_id": 1,
        "pad_token_id": 0, "initializer_range": std, "tie_word_embeddings": False,
    }  # fmt: skip
    audio = {"model_type": "qwen2_audio_encoder", "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
             "encoder_ffn_dim": 64, "d_model": 32, "max_source_positions": 50 * seconds}  # fmt: skip
    token = tokenizer.convert_tokens_to_ids(AUDIO)
    config = transformers.Qwen2AudioConfig(text_config=text, audio_config=audio, audio_token_index=token, tie_word_embeddings=False)
    config.dtype = "float32"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen2AudioForConditionalGeneration(config).float().eval()
        randomize(model, std)
    model.save_pretrained(path)
    saved = load_file(path / "model.safetensors")  # whose names have the language model's prefix twice
    save_file({name.replace("model.model.", "model."): one for name, one in saved.items()}, path / "model.safetensors", {"format": "pt"})
    tokenizer.save_pretrained(path)
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "Qwen2AudioProcessor", "feature_size": 16,
        "sampling_rate": 16000, "hop_length": 160, "n_fft": 400, "chunk_length": seconds,
        "padding_value": 0.0, "padding_side": "right", "return_attention_mask": True,
    }  # fmt: skip
    (path / "preprocessor_config.json").write_text(json.dumps(extractor, indent=2))
    return model
