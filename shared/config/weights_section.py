"""`[weights]`: pushing weights from the trainer to the engines."""

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from shared.config.section import MUTABLE, Rule, Section


class WeightsSection(Section):
    """Pushing weights from the trainer to the engines."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "join_from",
            lambda weights, given: given == "trainer" and weights.update_weight_transport == "disk",
            "nobody pushes with update_weight_transport = disk; use auto, peer or disk",
        ),
        Rule(
            "snapshot_interval",
            lambda weights, given: not given and (weights.update_weight_transport, weights.join_from) == ("nccl", "disk"),
            "join_from = disk needs snapshots; give how many versions lie between two",
        ),
    )

    update_weights_interval: int = Field(default=1, gt=0, description="training steps between pushes")
    update_weight_buffer_size: int = Field(default=536870912, gt=0, description="bytes of a bucket")
    update_weight_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None, description="type of the tensors on the wire; default: as the trainer has them"
    )
    check_weight_update_equal: bool = Field(
        default=False, description="after every push, send everything again and compare it with what the engines hold", **MUTABLE
    )
    skip_unchanged: bool = Field(default=False, description="do not send frozen parameters to a replica that has them", **MUTABLE)
    push_timeout: float = Field(default=120, gt=0, description="seconds for one push to all replicas", **MUTABLE)
    update_weight_transport: Literal["nccl", "disk"] = Field(
        default="nccl",
        description="how versions reach the engines: pushed over process groups (gloo on CPUs), or read by every engine from disk",
    )
    update_weight_mode: Literal["full", "delta"] = Field(
        default="full", description="snapshots on disk: whole checkpoints, or what changed since the one before", **MUTABLE
    )
    update_weight_disk_dir: Path | None = Field(
        default=None,
        description="where snapshots lie, below the run's name, for trainer and engines alike; default: weights in the run's directory",
    )
    update_weight_delta_encoding: Literal["xor", "overwrite"] = Field(
        default="xor", description="a delta's tensors: old xor new, or positions and values of the elements that changed", **MUTABLE
    )
    update_weight_full_interval: int = Field(default=10, gt=0, description="with delta: every so many snapshots one is whole", **MUTABLE)
    snapshot_interval: int = Field(
        default=20, ge=0, description="with nccl: versions between snapshots, which joiners read; 0 = none", **MUTABLE
    )
    keep_snapshots: int = Field(default=2, gt=0, description="snapshots kept, with all that they are made of", **MUTABLE)
    join_from: Literal["auto", "peer", "disk", "trainer"] = Field(
        default="auto",
        description="where a replica that comes late takes its weights: a serving replica, the newest snapshot, the trainer's next push; "
        "auto: the first of them that has the live version",
        **MUTABLE,
    )
