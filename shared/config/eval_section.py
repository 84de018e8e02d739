"""`[eval]`: held-out prompts."""

from typing import ClassVar

from pydantic import Field

from shared.config.file_fields import Files
from shared.config.section import MUTABLE, Rule, Section
from shared.schema.limits import MAX_SAMPLES


class EvalSection(Section):
    """Held-out prompts, generated and scored as a task class of their own."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "eval_interval",
            lambda held_out, given: given is not None and held_out.eval_prompt_data is None,
            "needs eval_prompt_data, the prompts to evaluate on",
        ),
    )

    eval_prompt_data: Files = Field(
        default=None, description="JSONL or Parquet files of held-out prompts, or parts PATH@[start:stop] of them; keys as in [data]"
    )
    eval_name: str = Field(
        default="heldout", max_length=64, pattern=r"^[A-Za-z0-9_-]+$", description="name of the dataset in metrics and group ids"
    )
    eval_interval: int | None = Field(default=None, gt=0, description="steps between evaluations, besides first and last", **MUTABLE)
    skip_eval_before_train: bool = Field(default=False, description="do not evaluate the initial weights")
    n_samples_per_eval_prompt: int = Field(default=1, gt=0, le=MAX_SAMPLES, description="samples a held-out prompt")
    eval_temperature: float | None = Field(default=None, ge=0, description="sampling temperature; default: the rollout's")
    eval_max_response_len: int | None = Field(default=None, gt=0, description="tokens; default: the rollout's")
