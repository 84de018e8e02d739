"""A tiny model that has learned a few conversations by heart, calls of tools among them: what its agents do then is known, and real."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional
from transformers import Qwen3ForCausalLM

from services.gateway.chat_tokens import ChatTokens
from tests.support.tiny_model import EOS, PAD, PRINTABLE, START, UNKNOWN

MARKS = ("<tool_call>", "</tool_call>")
"""They take the ids of two characters that nobody says."""

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name + '\n' }}{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' + (call.function.arguments | tojson) + "}\n</tool_call>" }}'
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS, SURE = 600, 0.02
"""The most steps of teaching, and the loss, in nats a token, by which it is over."""


@dataclass
class Conversation:
    """What is said: ``messages`` so far, and the ``answers`` of the model, each text or a call, with what is said to it."""

    tools: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    spans: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def taught(self, chat: ChatTokens, answer: str | dict[str, Any], *then: dict[str, Any]) -> "Conversation":
        """Adds an answer, which the model is to give: text, or ``{"name": …, "arguments": …}``, and the messages that follow it."""
        prompt, ids = chat.render(self.messages, self.tools).tolist(), chat.tokenizer
        text = answer if isinstance(answer, str) else f"{MARKS[0]}\n{json.dumps(answer)}\n{MARKS[1]}"
        self.spans.append((prompt, [*ids.encode(text).tolist(), *chat.stop_ids]))
        said: dict[str, Any] = {"role": "assistant", "content": text}
        if isinstance(answer, dict):
            function = {"name": answer["name"], "arguments": json.dumps(answer["arguments"])}
            said = {"role": "assistant", "content": "", "tool_calls": [{"id": "call", "type": "function", "function": function}]}
        self.messages += [said, *then]
        return self

    def tokens(self) -> tuple[list[int], list[int]]:
        """Returns the ids of the whole, and which of them are to be learned. Each turn's prompt continues from the turn before."""
        ids: list[int] = []
        learned: list[int] = []
        for prompt, answer in self.spans:
            assert prompt[: len(ids)] == ids
            learned += [0] * (len(prompt) - len(ids)) + [1] * len(answer)
            ids = prompt + answer
        return ids, learned


def write_tools_tokenizer(path: Path) -> ChatTokens:
    """Writes the tokenizer of a tiny model whose chat form has tools beside its weights. Returns the gateway's view of it."""
    replaced = dict(zip("^~", MARKS, strict=True))
    alphabet = [PAD, EOS, START, UNKNOWN, *(replaced.get(character, character) for character in PRINTABLE)]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(alphabet)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, EOS, START)])
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return ChatTokens(path, {})


def teach(untaught: Qwen3ForCausalLM, conversations: list[Conversation]) -> Qwen3ForCausalLM:
    """Returns a copy of a model that gives the answers of conversations, greedily."""
    model: Qwen3ForCausalLM = copy.deepcopy(untaught).train()
    pairs = [one.tokens() for one in conversations]
    width = max(len(ids) for ids, _ in pairs)
    ids, learned = (torch.tensor(_padded([pair[part] for pair in pairs], width)) for part in (0, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(STEPS):
        logits = model(input_ids=ids).logits[:, :-1]
        losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none") * learned[:, 1:].flatten()
        if float(losses.detach().max()) < SURE:
            return model.eval()
        optimizer.zero_grad()
        (losses.sum() / learned.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    raise AssertionError(f"after {STEPS} steps a token has a loss of {float(losses.detach().max()):.3g}")


def _padded(rows: list[list[int]], width: int) -> NDArray[np.int64]:
    return np.array([row + [0] * (width - len(row)) for row in rows])
