"""Makes a tiny model that sees, with random weights, and pictures of squares on noise, whose colour it is asked for.

The same seed gives the same files. Nothing is downloaded.
"""

import argparse
import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3VLConfig, Qwen3VLForConditionalGeneration

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "white": (240, 240, 240)}
SEES = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
TOKENS = ["<|pad|>", "<|im_end|>", "<|im_start|>", *SEES, *COLOURS, "colour", "?", "\n", " "]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>' }}{% endfor %}{{ '\n' if add_generation_prompt else '' }}"
)


def save_model(folder: Path, seed: int, larger: Mapping[str, Mapping[str, Any]] = {}) -> int:
    """Writes a Qwen3-VL of two layers and a tokenizer of a few words; returns how many parameters it has.

    Args:
        larger: sizes that take the place of those of ``text``, ``vision`` and of the processor's ``size``.
    """
    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, unk_token=" "))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]+|[^a-z]"), behavior="isolated")
    words.decoder = decoders.Fuse()
    special = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", *SEES]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = TEMPLATE
    names = ("vision_start", "image", "vision_end", "video")
    ids: dict[str, Any] = {f"{name}_token_id": TOKENS.index(token) for name, token in zip(names, SEES, strict=True)}
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text: dict[str, Any] = {
        **sizes,
        "vocab_size": len(TOKENS),
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    text |= {"max_position_embeddings": 512, "rope_parameters": rope, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    vision: dict[str, Any] = {**sizes, "depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"out_hidden_size": 64, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text, vision = {**text, **larger.get("text", {})}, {**vision, **larger.get("vision", {})}
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)).float()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor: dict[str, Any] = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    processor |= {"size": {"shortest_edge": 256, "longest_edge": 4096, **larger.get("size", {})}, "patch_size": vision["patch_size"]}
    processor |= {"merge_size": 2, "temporal_patch_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    return sum(parameter.numel() for parameter in model.parameters())


def picture(rng: np.random.Generator, colour: str, longest: int) -> bytes:
    """Returns a PNG of a third of ``longest`` to ``longest`` pixels a side: gray noise, and a square of the colour somewhere on it."""
    width, height = rng.integers(longest // 3, longest + 1, 2)
    pixels = np.repeat(rng.integers(60, 120, (height, width, 1)), 3, 2).astype(np.uint8)
    side = int(min(width, height) * rng.uniform(0.6, 0.9))
    left, top = rng.integers(0, width - side + 1), rng.integers(0, height - side + 1)
    pixels[top : top + side, left : left + side] = COLOURS[colour]
    Image.fromarray(pixels).save(encoded := io.BytesIO(), "PNG")
    return encoded.getvalue()


def write_prompts(path: Path, rng: np.random.Generator, count: int, beside: bool, longest: int = 48) -> None:
    """Writes ``count`` prompts; their pictures lie ``beside`` them as files, or in the lines themselves."""
    lines = []
    for number in range(count):
        colour = list(COLOURS)[rng.integers(len(COLOURS))]
        encoded, name = picture(rng, colour, longest), f"{path.stem}/{number}.png"
        if beside:
            (path.parent / path.stem).mkdir(exist_ok=True)
            (path.parent / name).write_bytes(encoded)
        shown = name if beside else f"data:image/png;base64,{base64.b64encode(encoded).decode()}"
        lines.append(json.dumps({"prompt": "<image>colour?", "images": [shown], "label": colour}))
    path.write_text("\n".join(lines) + "\n")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs/colours/data"), help="where the files go; made if missing")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures and of the model's weights")
    parser.add_argument("--train", type=int, default=512, help="pictures to train on", metavar="N")
    parser.add_argument("--heldout", type=int, default=64, help="pictures held out", metavar="N")
    options = parser.parse_args()
    for name in ("train", "heldout"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} {getattr(options, name)}: expected at least 1")
    folder, rng = options.folder, np.random.default_rng(options.seed)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = save_model(folder / "model", options.seed)
    write_prompts(folder / "train.jsonl", rng, options.train, beside=True)
    write_prompts(folder / "heldout.jsonl", rng, options.heldout, beside=False)
    print(f"{folder / 'model'}: Qwen3-VL with {parameters:,} random parameters")
    print(f"{folder}: {options.train} pictures to train on, {options.heldout} held out")


if __name__ == "__main__":
    main()
