"""`[episode]`: rollouts that are episodes of an environment that steps."""

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from shared.config.section import MUTABLE, Section
from shared.environment import environment_url as address


class EpisodeSection(Section):
    """Rollouts of several turns, between the model and an environment."""

    episode_url: str | None = Field(
        default=None,
        description="an environment that steps, http://host:port or nats:NAME: each rollout is one of its episodes, and its rewards count",
        **MUTABLE,
    )
    episode_reward: Literal["sum", "last"] = Field(default="sum", description="an episode's reward: the sum of its steps', or the last one")
    episode_turns: int = Field(default=16, gt=0, description="turns of an episode at most")
    episode_turn_tokens: int | None = Field(
        default=None, gt=0, description="tokens of one turn at most; default: what rollout_max_response_len leaves"
    )
    episode_timeout: float = Field(default=30, gt=0, description="seconds for each reset and step, broken connections included", **MUTABLE)
    episode_control_tokens: Literal["text", "as_written"] = Field(
        default="text",
        description="what control tokens are that the environment's messages and tools spell, through the chat template: text, encoded as "
        "such, or control tokens (as_written)",
    )

    def _misfits(self) -> Iterator[str]:
        if self.episode_url is not None:
            try:
                address.parse(self.episode_url)
            except ValueError as error:
                yield f"episode.episode_url: {error}"
