"""`[ingest]`: finished groups from outside."""

from typing import Literal

from pydantic import Field

from shared.config.section import MUTABLE, Section


class IngestSection(Section):
    """Groups that others have generated, by `POST /groups` at the gateway."""

    ingest_groups: Literal["off", "beside", "alone"] = Field(
        default="off",
        description="whether groups come in from outside: off; beside those that rollout services generate; alone: these leave "
        "training prompts to the producers outside, and generate held-out ones",
        **MUTABLE,
    )
    ingest_concurrency: int = Field(
        default=8, gt=0, description="groups that a gateway has in hand at once; beyond them it answers 429", **MUTABLE
    )
    ingest_bytes: int = Field(
        default=16 << 20, ge=1 << 10, description="of the largest group's body; while a gateway reads it, its other clients wait", **MUTABLE
    )
    ingest_wait: float = Field(
        default=10, gt=0, description="seconds that a group waits until the run admits one, before it is answered 429", **MUTABLE
    )
