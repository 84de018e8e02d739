"""`[store]`: payload storage."""

from typing import Literal

from pydantic import Field

from shared.config.section import MUTABLE, Section


class StoreSection(Section):
    """Payload storage."""

    blob_bytes: int = Field(default=262144, gt=0, description="a group's samples are split over blobs of about this size")
    appendfsync: Literal["always", "everysec", "no"] = Field(default="everysec", description="durability of the embedded Valkey's log")
    max_bytes: int | None = Field(
        default=None,
        ge=8 << 20,
        description="memory of the embedded Valkey, beyond which writers wait; default: a quarter of the machine's, or of the container's",
        **MUTABLE,
    )
