"""The seeds that samples are drawn by where the engine's flags ask for deterministic inference, as slime gives them.

The i-th sample of every group has ``rollout_seed + i``. An engine then draws each token by the seed and the token's position alone,
whatever else it computes at the time: two runs draw the same, and a sample that is interrupted goes on as if it had not been.
"""

from dataclasses import dataclass

from shared.config.run_config import RunConfig
from shared.config.sglang_flags import plain_name

SEEDED = ("enable-deterministic-inference", "rl-on-policy-target")
"""Flags of SGLang's under which it draws by seeds; without a seed of its own each request would have the same one."""


@dataclass(frozen=True)
class SampleSeeds:
    """``first``: the seed of a group's first sample; None: samples have none, and engines draw at random."""

    first: int | None

    @classmethod
    def of(cls, config: RunConfig) -> "SampleSeeds":
        given = {plain_name(name): value for name, value in config.rollout.sglang.items()}
        seeded = any(given.get(name) not in (None, False) for name in SEEDED)
        return cls(config.data.rollout_seed if seeded else None)

    def of_sample(self, index: int) -> int | None:
        """Returns the seed of a group's sample. ``index``: from 0."""
        return None if self.first is None else self.first + index

    def parameters(self, index: int) -> dict[str, int]:
        """Returns what it adds to the sampling parameters of a sample, in SGLang's words."""
        return {} if self.first is None else {"sampling_seed": self.first + index}
