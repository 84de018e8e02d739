"""The reward service's bench."""

from tests.support.reward_bench import bench

__all__ = ["bench"]
