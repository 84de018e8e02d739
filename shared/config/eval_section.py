"""`[eval]`: sets of held-out prompts, each with its own sampling, keys, reward and generate function.

A set is a table of ``[[eval.sets]]``, a pair of ``eval_prompt_data`` or a data set of slime's ``eval_config``; `eval_views` says what a set
leaves to the run. A field of a set wins over the field of ``[eval]``, and that over the run's own.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from shared.config.rollout_section import GENERATORS, Command, Roles, StopStrings
from shared.config.section import MUTABLE, ConfigTable, Rule, Section, Table, hook
from shared.data import data_files
from shared.data.data_files import DataFile
from shared.schema.message import MAX_SAMPLES

NAME = r"^[A-Za-z0-9_-]{1,64}$"  # The pattern of a set's name: it is part of its groups' ids, whose parts dots divide
ALONE = "heldout"  # The name of a set that is given without one

_FileList = Annotated[
    list[DataFile],
    PlainValidator(data_files.unweighted),
    PlainSerializer(lambda files: [str(file) for file in files], return_type=list[str]),
]


class EvalSet(ConfigTable):
    """One set of held-out prompts."""

    name: str = Field(pattern=NAME, description="name in figures and group ids: letters, digits, '-' and '_'")
    path: _FileList = Field(description="its files, JSONL or Parquet, or parts PATH@[start:stop] of them")
    rm_type: str | None = Field(default=None, description="what scores it, whatever its prompts name; default: reward.rm_type")
    custom_rm_path: str | None = hook("that scores it; default: reward.custom_rm_path")
    reward_key: str | None = Field(default=None, description="which of several named rewards counts; default: eval_reward_key")
    custom_generate_function_path: str | None = hook("that generates its samples; default: rollout.custom_generate_function_path")
    agent: str | None = hook("that plays its rollouts; default: rollout.agent")
    agent_options: Table | None = Field(default=None, description="what its agent is told; default: rollout.agent_options")
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
    stop: StopStrings | None = Field(default=None, max_length=32, description="stop strings; default: rollout_stop")
    stop_token_ids: list[int] | None = Field(default=None, description="default: rollout_stop_token_ids")
    repetition_penalty: float | None = Field(default=None, gt=0, le=2, description="default: 1, none")
    skip_special_tokens: bool | None = Field(default=None, description="leave them out of the text; default: rollout_skip_special_tokens")
    no_stop_trim: bool | None = Field(default=None, description="keep the stop string in the response's text; default: true")
    input_key: str | None = Field(default=None, description="default: eval_input_key")
    label_key: str | None = Field(default=None, description="default: eval_label_key")
    tool_key: str | None = Field(default=None, description="default: eval_tool_key")
    metadata_key: str | None = Field(default=None, description="default: data.metadata_key")
    apply_chat_template: bool | None = Field(default=None, description="default: data.apply_chat_template")
    apply_chat_template_kwargs: Table | None = Field(default=None, description="default: data.apply_chat_template_kwargs")
    metadata_overrides: Table | None = Field(default=None, description="put into the metadata of each prompt, over what it has")

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
        return [json.loads(item) if isinstance(item, str) else item for item in items]
    except json.JSONDecodeError as error:
        raise ValueError(f"expected tables [[eval.sets]], or JSON objects as words of a flag: {error}") from None


_AsPairs = PlainSerializer(
    lambda pairs: pairs and {item.name: [str(file) for file in item.path] for item in pairs}, return_type=dict[str, list[str]] | None
)
_AsTables = PlainSerializer(
    lambda sets: [item.model_dump(mode="json", exclude_none=True) for item in sets], return_type=list[dict[str, Any]]
)

PromptPairs = Annotated[list[EvalSet] | None, BeforeValidator(_pairs), _AsPairs]
"""``eval_prompt_data``: a list, so that a flag takes the words up to the next one."""

Sets = Annotated[list[EvalSet], BeforeValidator(_tables), _AsTables]  # ``[[eval.sets]]``


EVAL_LOOP = "slime.rollout.sglang_rollout.generate_rollout"  # slime's own function, which stands for Myxo's own loop over the sets


class EvalSection(Section):
    """Held-out prompts, generated and scored as a task class of their own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            ("eval_interval", "eval_function_path"),
            lambda held_out, given: given is not None and not held_out.named,
            "needs sets of held-out prompts: eval_prompt_data, eval_config or [[eval.sets]]",
        ),
        Rule("eval_top_k", lambda _, given: given is not None and given == 0, "at least 1, or -1 for all tokens"),
    )

    eval_prompt_data: PromptPairs = Field(
        default=None,
        description="held-out prompts, JSONL or Parquet: pairs NAME PATH, in TOML a table { NAME = PATH }; a single PATH is a set "
        "called heldout. PATH@[start:stop] takes part of a file",
    )
    sets: Sets = Field(
        default=[], description="tables [[eval.sets]], each a set with a name, a path and what it has of its own (docs/evaluation.md)"
    )
    eval_config: Path | None = Field(
        default=None, description="a YAML or JSON file of sets in slime's form (defaults, datasets), for eval_prompt_data; becomes sets"
    )
    eval_function_path: str | None = hook(
        "that evaluates all sets of a version; default: rollout_function_path, where that is given, else Myxo's own loop, which is also "
        f"what {EVAL_LOOP} stands for"
    )
    eval_interval: int | None = Field(default=None, gt=0, description="steps between evaluations, besides first and last", **MUTABLE)
    eval_timeout: float = Field(
        default=3600, gt=0, description="seconds for an evaluation, after which it ends with the samples that it has", **MUTABLE
    )
    skip_eval_before_train: bool = Field(default=False, description="do not evaluate the initial weights")
    n_samples_per_eval_prompt: int = Field(default=1, gt=0, le=MAX_SAMPLES, description="samples a held-out prompt")
    eval_temperature: float | None = Field(default=None, ge=0, description="sampling temperature; default: the rollout's")
    eval_top_p: float | None = Field(default=None, gt=0, le=1, description="nucleus sampling; default: the rollout's")
    eval_top_k: int | None = Field(default=None, ge=-1, description="top-k sampling, -1 = off; default: the rollout's")
    eval_min_new_tokens: int | None = Field(default=None, ge=0, description="tokens generated at least; default: no bound")
    eval_max_response_len: int | None = Field(default=None, gt=0, description="tokens; default: the rollout's")
    eval_max_prompt_len: int | None = Field(
        default=None, gt=0, description="tokens of a held-out prompt; longer ones: see overlong_prompts; default: no bound"
    )
    eval_max_context_len: int | None = Field(
        default=None, gt=1, description="tokens of a held-out prompt and its response together; default: no bound but the engine's"
    )
    eval_input_key: str | None = Field(default=None, description="key of the prompt; default: input_key")
    eval_label_key: str | None = Field(default=None, description="key of the reference answer; default: label_key")
    eval_tool_key: str | None = Field(default=None, description="key of the tools; default: tool_key")

    @property
    def named(self) -> dict[str, EvalSet]:
        """Returns the run's sets, by the field that an error of theirs names."""
        pairs = self.eval_prompt_data or []
        alone = len(pairs) == 1
        found = {f"eval.eval_prompt_data{'' if alone else '.' + item.name}": item for item in pairs}
        return found | {f"eval.sets.{item.name}": item for item in self.sets}

    def with_files(self, change: Callable[[str, DataFile], DataFile]) -> "EvalSection":
        """Returns the section with ``change`` called for each file, with the field that it stands in."""

        def changed(field: str, items: list[EvalSet] | None) -> list[EvalSet] | None:
            return items and [item.model_copy(update={"path": [change(field, file) for file in item.path]}) for item in items]

        fields = {name: changed(f"eval.{name}", getattr(self, name)) for name in ("eval_prompt_data", "sets")}
        return self.model_copy(update=fields)

    def absolute(self, base: Path) -> "EvalSection":
        """Returns the section with the paths of its sets absolute from ``base``."""
        return self.with_files(lambda _, file: file.absolute(base))

    def _misfits(self) -> Iterator[str]:
        pairs, tables = [item.name for item in self.eval_prompt_data or []], [item.name for item in self.sets]
        for name in dict.fromkeys(name for name in (*pairs, *tables) if (*pairs, *tables).count(name) > 1):
            field = "eval.sets.name" if name in tables else "eval.eval_prompt_data"
            besides = ", one of them in eval_prompt_data" if name in pairs and name in tables else ""
            yield f"{field}: two sets are called {name!r}{besides}; figures and groups are known by their set's name"
