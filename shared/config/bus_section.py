"""`[bus]`: delivery policy of the run's queues."""

from pydantic import Field

from shared.config.section import MUTABLE, Section


class BusSection(Section):
    """Delivery policy of the run's queues."""

    ack_wait: float = Field(default=30, gt=0, description="seconds before unextended work goes to somebody else")
    max_deliver: int = Field(default=3, gt=0, description="deliveries before a message is declared dead")
    max_ack_pending: int = Field(default=8192, gt=0, description="messages in workers' hands at once")
    max_queued: int = Field(default=1_000_000, gt=0, description="messages a queue holds before publishers wait")
    max_queued_bytes: int = Field(
        default=128 << 20, ge=4 << 20, description="bytes a queue holds before publishers wait, work in workers' hands included", **MUTABLE
    )
    max_ledger_bytes: int = Field(default=512 << 20, ge=4 << 20, description="bytes of the ledger, beyond which the run waits", **MUTABLE)
    full_timeout: float = Field(
        default=3600, gt=0, description="seconds that a service waits for room in a full stream or store before it ends", **MUTABLE
    )
    sync_interval: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="seconds between two syncs of the embedded NATS's files to disk: what a loss of power may take; 0: with each write",
        **MUTABLE,
    )
    replicas: int = Field(default=1, ge=1, le=5, description="copies of each stream in a NATS cluster")
    lease_duration: float = Field(default=5.0, ge=0.5, description="seconds after which a silent buffer's place is taken by another")
    registry_ttl: float = Field(default=10.0, ge=1, description="seconds after which a silent service is taken for gone")
    frozen_timeout: float = Field(
        default=60,
        ge=0,
        description="seconds without heartbeat, or server's answer, after which `myxo up` kills a process and starts it again; 0: never",
        **MUTABLE,
    )
