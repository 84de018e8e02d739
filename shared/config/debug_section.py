"""`[debug]`: halves of a run alone, dumps of what passes between them, profiles of both."""

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from shared.config.section import MUTABLE, Rule, Section

DUMPS = "debug.load_debug_rollout_data"  # The field that errors about dumps name

STEP, RANK = "{rollout_id}", "{rank}"  # What stands for the step and the rank in the paths of dumps, as slime has it

ProfileTarget = Literal["train_overall", "train_actor", "train_log_probs", "rollout"]


class DebugSection(Section):
    """Halves of a run alone, dumps of what passes between them, profiles of both."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "debug_rollout_only",
            lambda debug, given: given and debug.trains_only,
            "false where batches are read from files (load_debug_rollout_data): then there is nothing to generate",
        ),
        Rule(
            "profile_step_end",
            lambda debug, given: debug.use_pytorch_profiler and given <= debug.profile_step_start,
            "a step after profile_step_start = {0.profile_step_start}",
        ),
        Rule(
            "memory_snapshot_num_steps",
            lambda debug, given: debug.record_memory_history and debug.memory_recorder == "memray" and given is None,
            "the number of steps that memray records",
        ),
        Rule(
            "load_debug_rollout_data_subsample",
            lambda debug, given: given is not None and debug.load_debug_rollout_data is None,
            "belongs to load_debug_rollout_data",
        ),
    )

    debug_rollout_only: bool = Field(
        default=False,
        description="generate and score without a trainer: engines keep serving hf_checkpoint, and the trainer's service only counts the "
        "batches, and dumps them",
    )
    ignore_memory_plan: bool = Field(
        default=False,
        description="start also where a GPU is too small by `myxo plan`, which then is only told",
        **MUTABLE,
    )
    debug_train_only: bool = Field(default=False, description="train without engines and rewards, on load_debug_rollout_data")
    load_debug_rollout_data: str | None = Field(
        default=None,
        min_length=1,
        description="path, with {rollout_id} for the step, of dumped batches, Myxo's or slime's, to train in the place of generated ones; "
        "implies debug_train_only",
    )
    load_debug_rollout_data_subsample: float | None = Field(
        default=None, gt=0, le=1, description="share of each dump's samples that is trained: its first and its last ones, half of each"
    )
    save_debug_rollout_data: str | None = Field(
        default=None,
        description="path with {rollout_id}: each batch, as load_debug_rollout_data reads it; named *.pt in slime's own format",
        **MUTABLE,
    )
    save_debug_train_data: str | None = Field(
        default=None, description="path with {rollout_id} and {rank}: every tensor that a rank's steps read, as safetensors", **MUTABLE
    )
    dump_details: Path | None = Field(
        default=None, description="directory for both dumps of every step: rollout_data/{rollout_id}.pt, train_data/", **MUTABLE
    )

    use_pytorch_profiler: bool = Field(
        default=False, description="trace chosen steps with PyTorch's profiler; traces lie in profile/ of the run's directory", **MUTABLE
    )
    profile_step_start: int = Field(default=10, ge=0, description="the first step that is traced, from 0", **MUTABLE)
    profile_step_end: int = Field(default=12, gt=0, description="the step before which tracing ends", **MUTABLE)
    profile_target: list[ProfileTarget] = Field(
        default=["train_overall"],
        min_length=1,
        description="what is traced: train_overall (all that the trainer does, waits included), train_actor (its optimizer steps), "
        "train_log_probs (its passes before them), rollout (the engines)",
        **MUTABLE,
    )
    profile_engine_steps: int = Field(default=50, gt=0, description="forward passes of each engine that are traced", **MUTABLE)
    record_memory_history: bool = Field(
        default=False,
        description="record the trainer's allocations, and write them when memory runs out or memory_snapshot_num_steps are done",
        **MUTABLE,
    )
    memory_recorder: Literal["torch", "memray"] = Field(
        default="torch",
        description="what records them: PyTorch those on CUDA, memray (a package of its own) those in host memory",
        **MUTABLE,
    )
    memory_snapshot_num_steps: int | None = Field(
        default=None, gt=0, description="steps of this process after which they are written", **MUTABLE
    )
    memory_snapshot_path: str | None = Field(
        default=None,
        pattern=r"^[^/]+$",
        description="end of the files' names, after the rank; default: snapshot.pickle, snapshot.memray",
        **MUTABLE,
    )
    memory_snapshot_dir: Path | None = Field(
        default=None, description="where they are written; default: profile/ in the run's directory", **MUTABLE
    )

    @property
    def trains_only(self) -> bool:
        """Returns whether the run has neither engines nor rewards."""
        return self.debug_train_only or self.load_debug_rollout_data is not None

    @property
    def rollout_dump(self) -> str | None:
        """Returns the template of the batches' files."""
        details = self.dump_details
        return self.save_debug_rollout_data if details is None else f"{details}/rollout_data/{STEP}.pt"

    @property
    def train_dump(self) -> str | None:
        """Returns the template of the tensors' files; each rank writes one of its own."""
        details = self.dump_details
        given = self.save_debug_train_data if details is None else f"{details}/train_data/{STEP}_{RANK}.safetensors"
        if given is None or RANK in given:
            return given
        path = Path(given)
        return str(path.with_name(f"{path.stem}_{RANK}{path.suffix}"))

    def _misfits(self) -> Iterator[str]:
        if self.rollout_dump is not None and self.rollout_dump == self.train_dump:
            yield "debug.save_debug_train_data: the same path as save_debug_rollout_data"
        if self.rollout_dump is not None and self.rollout_dump == self.load_debug_rollout_data:
            yield "debug.load_debug_rollout_data: the same path as save_debug_rollout_data, which would replace what is read"
