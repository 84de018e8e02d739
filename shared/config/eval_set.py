"""A set of held-out prompts, as ``[[eval.sets]]`` and slime's data sets name its fields. None: what the run has."""

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, PlainValidator, model_validator

from shared.config.rollout_section import GENERATORS, Command, Roles
from shared.config.section import hook
from shared.data import data_files
from shared.data.data_files import DataFile
from shared.runtime.errors import nearest
from shared.schema.message import MAX_SAMPLES

NAME = r"^[A-Za-z0-9_-]{1,64}$"
"""The pattern of a set's name: it is part of its groups' ids, whose parts dots divide."""

ALONE = "heldout"
"""The name of a set that is given without one."""

_FileList = Annotated[
    list[DataFile],
    PlainValidator(data_files.unweighted),
    PlainSerializer(lambda files: [str(file) for file in files], return_type=list[str]),
]


class EvalSet(BaseModel):
    """One set of held-out prompts."""

    model_config = ConfigDict(extra="forbid", validate_default=True, allow_inf_nan=False)

    name: str = Field(pattern=NAME, description="name in figures and group ids: letters, digits, '-' and '_'")
    path: _FileList = Field(description="its files, JSONL or Parquet, or parts PATH@[start:stop] of them")
    rm_type: str | None = Field(default=None, description="what scores it, whatever its prompts name; default: reward.rm_type")
    custom_rm_path: str | None = hook("that scores it; default: reward.custom_rm_path")
    reward_key: str | None = Field(default=None, description="which of several named rewards counts; default: eval_reward_key")
    custom_generate_function_path: str | None = hook("that generates its samples; default: rollout.custom_generate_function_path")
    agent: str | None = hook("that plays its rollouts; default: rollout.agent")
    agent_options: dict[str, Any] | None = Field(default=None, description="what its agent is told; default: rollout.agent_options")
    agent_roles: Roles | None = Field(default=None, description="who plays its rollouts; default: rollout.agent_roles, with its agent")
    agent_command: Command | None = Field(default=None, description="command line that plays its rollouts; default: rollout.agent_command")
    n_samples_per_eval_prompt: int | None = Field(default=None, gt=0, le=MAX_SAMPLES, description="samples a prompt")
    temperature: float | None = Field(default=None, ge=0, description="default: eval_temperature")
    top_p: float | None = Field(default=None, gt=0, le=1, description="default: eval_top_p")
    top_k: int | None = Field(default=None, ge=-1, description="-1: all tokens; default: eval_top_k")
    max_response_len: int | None = Field(default=None, gt=0, description="tokens; default: eval_max_response_len")
    max_prompt_len: int | None = Field(default=None, gt=0, description="tokens; default: eval_max_prompt_len")
    max_context_len: int | None = Field(default=None, gt=1, description="tokens of prompt and response; default: eval_max_context_len")
    min_new_tokens: int | None = Field(default=None, ge=0, description="default: eval_min_new_tokens")
    stop: list[str] | None = Field(default=None, max_length=32, description="stop strings; default: rollout_stop")
    stop_token_ids: list[int] | None = Field(default=None, description="default: rollout_stop_token_ids")
    repetition_penalty: float | None = Field(default=None, gt=0, le=2, description="default: 1, none")
    skip_special_tokens: bool | None = Field(default=None, description="leave them out of the response's text; default: true")
    no_stop_trim: bool | None = Field(default=None, description="keep the stop string in the response's text; default: true")
    input_key: str | None = Field(default=None, description="default: eval_input_key")
    label_key: str | None = Field(default=None, description="default: eval_label_key")
    tool_key: str | None = Field(default=None, description="default: eval_tool_key")
    metadata_key: str | None = Field(default=None, description="default: data.metadata_key")
    apply_chat_template: bool | None = Field(default=None, description="default: data.apply_chat_template")
    apply_chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="default: data.apply_chat_template_kwargs")
    metadata_overrides: dict[str, Any] | None = Field(default=None, description="put into the metadata of each prompt, over what it has")

    @property
    def generators(self) -> list[str]:
        """Returns which of `GENERATORS` the set has of its own."""
        return [name for name in GENERATORS if getattr(self, name)]

    @model_validator(mode="after")
    def _has_one_generator(self) -> Self:
        if len(self.generators) > 1:
            raise ValueError(f"set {self.name!r}: {' and '.join(self.generators)}; only one of them can generate")
        return self


def _pairs(value: Any) -> Any:
    """Reads ``eval_prompt_data``: words NAME PATH …, a table NAME → PATH, or one PATH. Raises ValueError."""
    if value is None or (isinstance(value, list) and value and all(isinstance(item, EvalSet) for item in value)):
        return value
    return [{"name": name, "path": data_files.unweighted(path)} for name, path in _named(value)]


def _named(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, dict) and not value.keys() <= {"path", "weight"}:
        return value.items()
    words = value if isinstance(value, list) else [value]
    if len(words) < 2:
        return [(ALONE, value)]
    if len(words) % 2:
        raise ValueError(f"{len(words)} words are no pairs; give NAME PATH NAME PATH …, or one PATH")
    for name in words[::2]:
        if not isinstance(name, str) or not re.match(NAME, name):
            raise ValueError(f"{name!r} stands where a set's name should (letters, digits, '-' and '_'); give NAME PATH NAME PATH …")
    return zip(words[::2], words[1::2], strict=True)


def _tables(value: Any) -> Any:
    """Reads ``sets``: tables, or JSON text of them, as a flag gives it. Raises ValueError."""
    items = value if isinstance(value, list) else [value]
    try:
        tables = [json.loads(item) if isinstance(item, str) else item for item in items]
    except json.JSONDecodeError as error:
        raise ValueError(f"expected tables [[eval.sets]], or JSON objects as words of a flag: {error}") from None
    valid = list(EvalSet.model_fields)
    for index, table in enumerate(tables):
        if isinstance(table, dict) and (unknown := [name for name in table if name not in valid]):
            raise ValueError(f"set {table.get('name', index)!r}: unknown key {unknown[0]}; {nearest(unknown[0], valid)}")
    return tables


_AsPairs = PlainSerializer(
    lambda pairs: pairs and {item.name: [str(file) for file in item.path] for item in pairs}, return_type=dict[str, list[str]] | None
)
_AsTables = PlainSerializer(
    lambda sets: [item.model_dump(mode="json", exclude_none=True) for item in sets], return_type=list[dict[str, Any]]
)

PromptPairs = Annotated[list[EvalSet] | None, BeforeValidator(_pairs), _AsPairs]
"""``eval_prompt_data``: a list, so that a flag takes the words up to the next one."""

Sets = Annotated[list[EvalSet], BeforeValidator(_tables), _AsTables]
"""``[[eval.sets]]``."""
