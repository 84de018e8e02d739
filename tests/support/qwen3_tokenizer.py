"""A character tokenizer with the special tokens and the chat form of Qwen3, written locally."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from renderers import qwen3
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))

TEMPLATE = (
    "{%- if tools %}{{ '<|im_start|>system\\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{ header }}{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}{{ footer + '<|im_end|>\\n' }}"
    "{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not loop.first or message.content %}{{ '\\n' }}{%- endif %}"
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ (call.function.arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}"
    "{{ '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""The form, without what it does with reasoning."""


def write_qwen3_tokenizer(
    path: Path, template: str | None = TEMPLATE, special: Sequence[str] = SPECIAL, settings: Mapping[str, str] = {"eos_token": "<|im_end|>"}
) -> Path:
    """Writes a checkpoint directory that has a tokenizer and nothing else; returns it. ``template``: None for none. ``special``: the
    special tokens of another model. ``settings``: of tokenizer_config.json."""
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(ALPHABET)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = dict(settings)
    if template is not None:
        texts = {"header": qwen3._TOOLS_HEADER, "footer": qwen3._TOOLS_FOOTER}
        settings["chat_template"] = "".join(f"{{%- set {name} = {json.dumps(text)} %}}" for name, text in texts.items()) + template
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path
