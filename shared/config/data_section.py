"""`[data]`: prompts and how they are read."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from shared.config.file_fields import WeightedFiles
from shared.config.section import LARGEST_SEED, MUTABLE, Section, hook


class DataSection(Section):
    """Prompts and how they are read."""

    prompt_data: WeightedFiles = Field(
        default=None,
        description="JSONL or Parquet files of prompts: PATH, PATH@[start:stop] for a part of its rows, PATH@[start:stop]*WEIGHT to draw "
        "from it more or less often; hf:ORG/NAME:SPLIT in the place of PATH is a split of a data set on the Hugging Face hub; needed "
        "unless data_source or reasoning_gym is given",
    )
    data_source: str | None = hook("that makes a source of prompts")
    input_key: str = Field(default="prompt", description="key of the prompt: text, or a list of chat messages")
    label_key: Annotated[str | None, BeforeValidator(lambda given: None if given == "" else given)] = Field(
        default="label", description='key of the reference answer; none, or "" in TOML: prompts have none'
    )
    metadata_key: str = Field(default="metadata", description="key of an object handed on to the environment")
    tool_key: str = Field(default="tools", description="key of a list of tools, handed to the chat template; a prompt may have none")
    apply_chat_template: bool = Field(default=False, description="render the prompt through the model's chat template")
    apply_chat_template_kwargs: dict[str, Any] = Field(default={}, description="extra variables for the chat template")
    add_special_tokens: bool = Field(
        default=True,
        description="begin text that no chat template renders, of prompts and of demonstrations, with what the checkpoint's tokenizer puts "
        "before a text: BOS, for most",
    )
    overlong_prompts: Literal["refuse", "filter"] = Field(
        default="refuse", description="prompts over rollout_max_prompt_len: refuse the run, or leave them out and count them"
    )
    bad_prompts: Literal["refuse", "skip"] = Field(
        default="refuse", description="lines that are no prompt: refuse the run, or leave them out and count them"
    )
    accept_changed_data: bool = Field(
        default=False,
        description="go on where a file of prompts is another than when the run began",
        **MUTABLE,
    )
    rollout_shuffle: bool = Field(default=False, description="shuffle each epoch with rollout_seed + epoch")
    rollout_seed: int = Field(default=42, ge=0, le=LARGEST_SEED, description="seed of the prompt order and of the engines")
