"""A checkpoint's tokenizer with the methods by which the `renderers` package asks for it."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.data.call_form import in_call_form
from shared.data.control_tokens import ControlTokens
from shared.data.tokenizer import Tokenizer

KEPT_CHARACTERS = 16 << 20
"""Of texts whose ids are remembered, all together: clients send a conversation whole each time, and renderers encode message by message."""


class EncodedTexts:
    """The ids of texts; of those that were asked for last they are remembered."""

    def __init__(self, tokenizer: Tokenizer | ControlTokens, most: int = KEPT_CHARACTERS) -> None:
        self._tokenizer, self._most = tokenizer, most
        self._ids: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._lock = threading.Lock()
        self.characters = 0

    def of(self, text: str) -> NDArray[np.int32]:
        """Returns a text's ids: int32 [T], not to be changed."""
        with self._lock:  # long prompts are made in threads of their own
            if (found := self._ids.get(text)) is not None:
                self._ids.move_to_end(text)
                return found
        ids = self._tokenizer.encode(text)
        with self._lock:
            if text not in self._ids:
                self.characters += len(text)
            self._ids[text] = ids
            while self.characters > self._most:
                self.characters -= len(self._ids.popitem(last=False)[0])
        return ids


class RendererTokenizer:
    """``variables``: of the run for the chat template. The methods' names and arguments are those of Hugging Face's tokenizers."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any], control: ControlTokens) -> None:
        self._tokenizer, self._variables, self._control = tokenizer, dict(variables), control
        self._encoded = EncodedTexts(control)
        self.eos_token_id = tokenizer.eos_id
        self.all_special_tokens = tokenizer.skipped_tokens

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return self._encoded.of(text).tolist()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self._tokenizer.token_id(token) for token in tokens]

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Any = None, add_generation_prompt: bool = False, **variables: Any
    ) -> list[int]:
        """Returns the ids of the rendered messages. Raises ConfigError where the template refuses them."""
        for option in ("tokenize", "return_dict"):
            variables.pop(option, None)
        given = {**self._variables, **variables, "tools": tools, "add_generation_prompt": add_generation_prompt}
        text = self._tokenizer.render(in_call_form(self._tokenizer, messages, given), given)
        return self._control.encode(text).tolist()
