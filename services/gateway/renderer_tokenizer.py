"""A checkpoint's tokenizer with the methods by which the `renderers` package asks for it."""

from collections.abc import Mapping, Sequence
from typing import Any

from shared.data.tokenizer import Tokenizer


class RendererTokenizer:
    """``variables``: of the run for the chat template. The methods' names and arguments are those of Hugging Face's tokenizers."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
        self._tokenizer, self._variables = tokenizer, dict(variables)
        self.eos_token_id = tokenizer.eos_id
        self.all_special_tokens = tokenizer.special_tokens

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text)]

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
        return self.encode(self._tokenizer.render([dict(message) for message in messages], given))
