"""Tiny random models that see, with the character tokenizer of `tests.support.tiny_model` and the files of their processors."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.support.qwen3_tokenizer import SPECIAL, TEMPLATE, write_qwen3_tokenizer
from tests.support.tiny_model import PRINTABLE, character_tokenizer

VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
MARKS = {"image": IMAGE, "video": VIDEO, "vision_start": VISION_START, "vision_end": VISION_END}
GLM_MARKS = {
    "image": "<|image|>", "video": "<|video|>", "image_start": "<|begin_of_image|>", "video_start": "<|begin_of_video|>",
    "image_end": "<|end_of_image|>", "video_end": "<|end_of_video|>",
}  # fmt: skip
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def randomize(model: torch.nn.Module, std: float) -> None:
    """Gives random values to what the model's own initialisation leaves constant: norms, biases, embeddings of zeros."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn_like(parameter) * std)
        elif parameter.std() < std / 10:
            parameter.data.normal_(std=std)


def png(width: int, height: int, color: tuple[int, int, int] | None = None, seed: int = 0, kind: str = "PNG") -> bytes:
    """Returns an encoded picture, of one color or of noise."""
    noise = np.random.RandomState(seed).randint(0, 255, (height, width, 3), dtype=np.uint8)
    picture = Image.fromarray(noise) if color is None else Image.new("RGB", (width, height), color)
    picture.save(encoded := io.BytesIO(), kind)
    return encoded.getvalue()


def gif(width: int, height: int, milliseconds: list[int]) -> bytes:
    """Returns an animation of noise, whose frames last so long."""
    frames = [Image.open(io.BytesIO(png(width, height, seed=number))) for number in range(len(milliseconds))]
    frames[0].save(encoded := io.BytesIO(), "GIF", save_all=True, append_images=frames[1:], duration=milliseconds)
    return encoded.getvalue()


def write_tiny_vision_model(path: Path, kind: str, *, seed: int = 0, alphabet: str = PRINTABLE, std: float = 0.1, room: int = 0) -> Any:
    """Writes a checkpoint of a ``kind``, qwen2_5_vl, qwen3_vl, qwen3_5 or glm4v, and returns the float32 model.

    ``room``: ids beyond those of the tokenizer."""
    tokenizer = character_tokenizer(alphabet)
    marks = GLM_MARKS if kind == "glm4v" else MARKS
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", *marks.values()]})
    tokenizer.chat_template = CHAT_TEMPLATE
    for ours, theirs in zip((IMAGE, VISION_START, VISION_END), list(GLM_MARKS.values())[::2] if kind == "glm4v" else (), strict=False):
        tokenizer.chat_template = tokenizer.chat_template.replace(ours, theirs)
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in marks.items()}
    patch = 14 if kind in ("qwen2_5_vl", "glm4v") else 4  # SGLang's engine on a CPU has windows of patches of 14 alone
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer) + room,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": std,
    }
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 64,
    }
    if kind == "qwen2_5_vl":
        text |= {"rope_parameters": rope}
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    elif kind == "glm4v":
        text |= {"rope_parameters": {**rope, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}}
        vision |= {"image_size": 8 * patch}
    elif kind == "qwen3_vl":
        text |= {"head_dim": 16, "rope_parameters": {**rope, "mrope_interleaved": True}}
        vision |= {"depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    else:
        linear = {"key_heads": 2, "value_heads": 4}
        text |= {f"linear_num_{name}": count for name, count in linear.items()}
        text |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "num_hidden_layers": 4}
        text |= {"head_dim": 64, "rope_parameters": {**rope, "mrope_interleaved": True, "partial_rotary_factor": 0.25}}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": []}
    name = {"qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5", "glm4v": "Glm4v"}[kind]
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **ids, tie_word_embeddings=False)
    config.dtype = "float32"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
        randomize(model, std)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    written = json.loads((path / "config.json").read_text())
    written["vision_config"] |= {name: value for name, value in vision.items() if name not in written["vision_config"]}
    written["text_config"] |= {"full_attention_interval": 4} if kind == "qwen3_5" else {}
    (path / "config.json").write_text(json.dumps(written, indent=2))
    size = {"shortest_edge": 4 * patch**2, "longest_edge": 256 * patch**2}
    processor: dict[str, Any] = {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": size,
    }
    processor |= {
        "image_processor_type": "Glm4vImageProcessorFast" if kind == "glm4v" else "Qwen2VLImageProcessorFast",
        "min_pixels": size["shortest_edge"],
        "max_pixels": size["longest_edge"],
    }
    processor["processor_class"] = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "glm4v": "Glm4vProcessor"}.get(kind, "Qwen3VLProcessor")
    (path / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    return model


PARTS = (
    "{%- macro shown(content) %}{%- if content is string %}{{ content }}{%- else %}{%- for part in content %}"
    "{{ '<|vision_start|><|' ~ part.type ~ '_pad|><|vision_end|>' if part.type in ('image', 'video') else part.text }}"
    "{%- endfor %}{%- endif %}{%- endmacro %}"
)


def write_seeing_chat_model(path: Path, kind: str = "qwen3_vl") -> Any:
    """Writes a tiny Qwen3-VL, or of another ``kind``, with the chat form of Qwen3, tools among it, and returns the float32 model."""
    model = write_tiny_vision_model(path, kind, room=32)
    (path / "chat_template.jinja").unlink()
    template = PARTS + TEMPLATE.replace("message.content + '<|im_end|>", "shown(message.content) + '<|im_end|>")
    write_qwen3_tokenizer(path, template, [*SPECIAL, VISION_START, VISION_END, IMAGE, VIDEO])
    ids = {one["content"]: one["id"] for one in json.loads((path / "tokenizer.json").read_text())["added_tokens"]}
    names = MARKS
    config = json.loads((path / "config.json").read_text()) | {f"{name}_token_id": ids[token] for name, token in names.items()}
    config["text_config"] |= {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids["<|im_end|>"]}))
    for name, token in names.items():
        setattr(model.config, f"{name}_token_id", ids[token])
    return model
