"""``slime.utils.mask_utils``: token ids of a whole conversation, and which of them the assistant generated.

Each message is rendered by itself or behind a placeholder, as the kind of chat template needs it, so that its tokens are known. A message
with ``step_loss_mask`` other than 1 is not trained.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import numpy as np

Messages = list[dict[str, Any]]
Masked = tuple[list[int], list[int]]  # Token ids, and for each 1 where it is trained

PLACEHOLDER = "A TEXT OF NO MEANING"


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """Returns of each mask the length from its first 1 on, 0 without one."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Makes ids and masks of conversations.

    Args:
        tokenizer: transformers', with a chat template. tokenizer_type: the kind of its template: ``qwen`` (every message stands by itself),
            ``qwen3`` (reasoning of earlier turns is left out; tools' answers share a turn), ``qwen3_5`` (found in the rendered text) or
            ``distill_qwen`` (a prompt and one answer).

    Raises ValueError for another kind, when a mask is asked for.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer, self.tokenizer_type = tokenizer, tokenizer_type
        self.system_message_length = self.gen_token_length = 0
        if tokenizer_type in ("qwen", "qwen3"):
            self.system_message_length, self.gen_token_length = self.get_system_message_length()

    def get_loss_mask(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> Masked:
        """Returns ids and mask of a conversation."""
        match self.tokenizer_type:
            case "qwen" if "<｜Assistant｜>" in self.tokenizer.get_added_vocab():
                return self.gen_multi_turn_loss_mask_distill_qwen(messages, tools)
            case "qwen":
                return self.gen_multi_turn_loss_mask_qwen(messages, tools)
            case "qwen3":
                return self.gen_multi_turn_loss_mask_qwen3(messages, tools)
            case "qwen3_5":
                return self.gen_multi_turn_loss_mask_qwen3_5(messages, tools)
            case "distill_qwen":
                return self.gen_multi_turn_loss_mask_distill_qwen(messages, tools)
        raise ValueError(f"tokenizer_type is {self.tokenizer_type!r}; expected qwen, qwen3, qwen3_5 or distill_qwen")

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Returns as the function of this name."""
        return get_response_lengths(loss_masks)

    def find_all_sublist_indices(self, main_list: list[int], sublist: list[int]) -> list[int]:
        """Returns where ``sublist`` begins in ``main_list``."""
        size = len(sublist)
        return [at for at in range(len(main_list) - size + 1) if main_list[at : at + size] == sublist]

    def get_system_message_length(self) -> tuple[int, int]:
        """Returns how many tokens the template puts in front of a message that stands alone, and how many prompt the assistant."""
        words = self._ids_of_text(PLACEHOLDER)
        twice: Messages = [{"role": "user", "content": PLACEHOLDER}] * 2
        rendered = self._ids_of_text(self.tokenizer.apply_chat_template(twice, tokenize=False))
        first, second = self.find_all_sublist_indices(rendered, words)
        behind = len(rendered) - second - len(words)
        before = second - first - len(words) - behind
        return first - before, len(self._ids(twice, add_generation_prompt=True)) - len(rendered)

    def gen_multi_turn_loss_mask_qwen(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> Masked:
        """Returns ids and mask where every message may be rendered by itself."""
        pieces = []
        for index, message in enumerate(messages):
            ids = self._ids([message], tools=tools) if index == 0 else self._ids([message])
            pieces.append((message, self._without_system(index, message, ids)))
        return self._masked(pieces)

    def gen_multi_turn_loss_mask_qwen3(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> Masked:
        """Returns ids and mask where the template looks at a message's neighbours: each is rendered beside a placeholder."""
        beside = {"role": "user", "content": PLACEHOLDER}
        size, pieces = len(self._ids([beside])), []
        for index, turn in _turns(messages):
            ids = self._ids([*turn, beside], tools=tools)[:-size] if index == 0 else self._ids([beside, *turn])[size:]
            pieces.append((turn[0], self._without_system(index, turn[0], ids)))
        return self._masked(pieces)

    def gen_multi_turn_loss_mask_qwen3_5(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> Masked:
        """Returns ids and mask by where the assistant's messages stand in the rendered text. Raises ValueError where they do not."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, tools=tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if encoded.get("offset_mapping") is None:
            raise ValueError("the tokenizer does not tell where tokens stand in the text; qwen3_5 needs a fast one")
        ids = list(encoded["input_ids"])
        if ids != self._ids(messages, tools=tools):
            raise ValueError("the template's text and its tokens differ")
        generated = np.zeros(len(text) + 1, np.int64)
        for first, last in _assistant_spans(text, messages):
            generated[first + 1 : last + 1] = 1
        before = np.cumsum(generated)  # of each position, how many characters before it were generated
        return ids, [int(end > start and before[end] > before[start]) for start, end in encoded["offset_mapping"]]

    def gen_multi_turn_loss_mask_distill_qwen(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> Masked:
        """Returns ids and mask of a prompt and the one answer to it, which is the last message."""
        prompt = self.tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True, tools=tools)
        asked, answered = self._ids_of_text(prompt), self._ids_of_text(messages[-1]["content"])
        trained = int(messages[-1].get("step_loss_mask", 1) == 1)
        return asked + answered, [0] * len(asked) + [trained] * len(answered)

    def get_loss_mask_with_multimodal_alignment(
        self, messages: Messages, input_ids: list[int], tools: list[dict[str, Any]] | None = None
    ) -> Masked:
        """Returns the given ids and a mask for them: that of the messages' text, behind zeros. Raises ValueError where it is longer."""
        _, mask = self.get_loss_mask([_text_alone(message) for message in messages], tools=tools)
        if len(input_ids) < len(mask):
            raise ValueError(f"{len(input_ids)} input ids for a text of {len(mask)} tokens")
        return input_ids, [0] * (len(input_ids) - len(mask)) + mask

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """Returns the text of each unbroken run of trained tokens."""
        runs = groupby(zip(token_ids, loss_masks, strict=False), key=lambda pair: pair[1] == 1)
        return [self.tokenizer.decode([token for token, _ in run]) for trained, run in runs if trained]

    def _masked(self, pieces: list[tuple[dict[str, Any], list[int]]]) -> Masked:
        """Returns the pieces' ids end to end; of an assistant's all but what prompts it is trained."""
        ids, mask = [], []
        for message, piece in pieces:
            generated = message["role"] == "assistant" and message.get("step_loss_mask", 1) == 1
            prompting = min(self.gen_token_length, len(piece)) if generated else len(piece)
            ids += piece
            mask += [0] * prompting + [1] * (len(piece) - prompting)
        return ids, mask

    def _without_system(self, index: int, message: dict[str, Any], ids: list[int]) -> list[int]:
        return ids[self.system_message_length :] if index > 0 and message["role"] != "system" else ids

    def _ids(self, messages: Messages, **options: Any) -> list[int]:
        return list(self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))

    def _ids_of_text(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _turns(messages: Messages) -> Iterator[tuple[int, Messages]]:
    """Yields the messages with their index, successive answers of tools together."""
    index = 0
    for is_tool, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        members = list(run)
        for turn in [members] if is_tool else [[member] for member in members]:
            yield index, turn
            index += len(turn)


def _assistant_spans(text: str, messages: Messages) -> Iterator[tuple[int, int]]:
    """Yields the characters, from and to, that the assistant generated: behind its header and an opened thought, its end mark included."""
    header, thought, mark, at = "<|im_start|>assistant\n", "<think>\n", "<|im_end|>", 0
    for message in messages:
        if message["role"] != "assistant":
            continue
        begin = text.find(header, at)
        end = text.find(mark, begin + len(header))
        if begin < 0 or end < 0:
            raise ValueError("an assistant's message is not to be found in the rendered text")
        begin += len(header)
        at = end + len(mark)
        at += text.startswith("\n", at)
        if message.get("step_loss_mask", 1) == 1:
            yield begin + len(thought) * text.startswith(thought, begin), at


def _text_alone(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = [item["text"] if isinstance(item, dict) else item for item in content if isinstance(item, str) or item.get("type") == "text"]
    return {"role": message["role"], "content": " ".join(parts)}
