"""The wire schema: every message that crosses the control plane.

Each message is a pydantic model, MessagePack on the wire, in an envelope ``{"schema": 1, "kind": <class name>, ...fields}``.
A receiver refuses an unknown schema version, an unknown kind and a field that does not fit, with a `BadMessage` that names it.
The catalogue in ``docs/messages.md`` is generated from these models.
"""

from shared.messages.base import SCHEMA, Message, Part, Tokens
from shared.messages.batch import (
    Accepted,
    Batch,
    BatchAnswer,
    BatchGroup,
    BatchPending,
    BatchRequest,
    Durable,
    Refused,
    RewardPart,
    RunDone,
    Trained,
)
from shared.messages.group import Failed, Generated, Interrupted, Outcome, Payload, SampleMeta, Sampling, Score, Scored, Task, outcome_id
from shared.messages.registry import LeaseCard, ServiceCard, ServiceEvent, TrainerStep, WarmStartEnded
from shared.messages.weights import (
    WeightsAbort,
    WeightsAsleep,
    WeightsCommit,
    WeightsLane,
    WeightsLend,
    WeightsLent,
    WeightsLive,
    WeightsOffer,
    WeightsPrepare,
    WeightsReady,
    WeightsReceive,
    WeightsReceived,
    WeightsSleep,
    WeightsSnapshot,
    WeightsWake,
)

__all__ = [
    "SCHEMA",
    "Accepted",
    "Batch",
    "BatchAnswer",
    "BatchGroup",
    "BatchPending",
    "BatchRequest",
    "Durable",
    "Failed",
    "Generated",
    "Interrupted",
    "LeaseCard",
    "Message",
    "Outcome",
    "Part",
    "Payload",
    "Refused",
    "RewardPart",
    "RunDone",
    "SampleMeta",
    "Sampling",
    "Score",
    "Scored",
    "ServiceCard",
    "ServiceEvent",
    "Task",
    "Tokens",
    "Trained",
    "TrainerStep",
    "WarmStartEnded",
    "WeightsAbort",
    "WeightsAsleep",
    "WeightsCommit",
    "WeightsLane",
    "WeightsLend",
    "WeightsLent",
    "WeightsLive",
    "WeightsOffer",
    "WeightsPrepare",
    "WeightsReady",
    "WeightsReceive",
    "WeightsReceived",
    "WeightsSleep",
    "WeightsSnapshot",
    "WeightsWake",
    "outcome_id",
]
