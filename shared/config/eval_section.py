"""`[eval]`: sets of held-out prompts, each with its own sampling, keys, reward and generate function.

A set is a table of ``[[eval.sets]]``, a pair of ``eval_prompt_data`` or a data set of slime's ``eval_config``; `eval_set` reads the tables,
`eval_views` says what a set leaves to the run. A field of a set wins over the field of ``[eval]``, and that over the run's own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from shared.config.eval_set import EvalSet, PromptPairs, Sets
from shared.config.section import MUTABLE, Rule, Section, hook
from shared.data.data_files import DataFile
from shared.schema.message import MAX_SAMPLES

EVAL_LOOP = "slime.rollout.sglang_rollout.generate_rollout"
"""slime's own function, which stands for Myxo's own loop over the sets."""


class EvalSection(Section):
    """Held-out prompts, generated and scored as a task class of their own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "eval_interval",
            lambda held_out, given: given is not None and not held_out.named,
            "needs sets of held-out prompts: eval_prompt_data, eval_config or [[eval.sets]]",
        ),
        Rule(
            "eval_function_path",
            lambda held_out, given: given is not None and not held_out.named,
            "needs sets of held-out prompts, as with slime: eval_prompt_data, eval_config or [[eval.sets]]",
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
        default=None,
        description="a YAML or JSON file of sets in slime's form (defaults, datasets), for eval_prompt_data; becomes sets",
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
