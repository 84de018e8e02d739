"""The reward of the quick start, by its own config."""

import tomllib
from pathlib import Path

from shared.config.reward_section import RewardSection
from shared.rewards.reference import Reference
from shared.rewards.verifiers import pattern_answer, verify

_CONFIG = Path(__file__).parents[2] / "examples" / "arithmetic" / "quickstart.toml"


def quickstart_reward(response: str, label: str) -> object:
    """Returns what a response earns in the quick start."""
    reward = RewardSection(**tomllib.loads(_CONFIG.read_text())["reward"])
    return verify(reward.rm_type, pattern_answer(response, reward.answer_pattern), Reference(label))
