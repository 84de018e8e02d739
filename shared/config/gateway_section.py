"""`[gateway]`: where clients of language models' APIs meet the engines."""

from typing import Literal

from pydantic import Field

from shared.config.section import MUTABLE, Section


class GatewaySection(Section):
    """Gateways: addresses and limits."""

    gateway_replicas: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="gateways that `myxo up` starts; default: with an agent one for each 8 cores of the machine, 8 at most; one where "
        "gateway_port is given, or the run only takes groups from outside; else none",
        **MUTABLE,
    )
    gateway_host: str = Field(default="127.0.0.1", min_length=1, description="where gateways serve their API", **MUTABLE)
    gateway_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="of the first gateway, each other one port further on; 0: any free ones, which they keep",
        **MUTABLE,
    )
    gateway_models: list[str] = Field(
        default=[], description="names that requests may give the model besides its own and the run's; *: any", **MUTABLE
    )
    gateway_requests: int = Field(
        default=2048, gt=0, description="requests that a gateway has in hand at once; beyond them it answers 429", **MUTABLE
    )
    gateway_replica_requests: int = Field(
        default=256,
        gt=0,
        description="draws that a gateway has at a replica at once, at most; fewer while the engine lacks memory",
        **MUTABLE,
    )
    gateway_turn_timeout: float = Field(default=600, gt=0, description="seconds for one turn, waiting for a replica included", **MUTABLE)
    gateway_wait: float = Field(
        default=30,
        ge=0,
        description="of these, seconds that a turn waits for a replica with room and weights before it gets 429 or 503",
        **MUTABLE,
    )
    gateway_control_tokens: Literal["text", "as_written"] = Field(
        default="text",
        description="what control tokens are that clients' messages and tools spell: text, encoded as such, or control tokens (as_written)",
    )
    gateway_checkpoint_tokens: int = Field(
        default=1024,
        gt=0,
        description="a turn is recorded each so many tokens: what another gateway goes on from if this one dies",
        **MUTABLE,
    )
