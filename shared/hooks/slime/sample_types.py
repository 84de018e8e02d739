"""``slime.utils.types``: the sample, and the type of a rank's batch."""

from typing import Any

from shared.hooks.hook_sample import HookSample as Sample

RolloutBatch = dict[str, Any]

__all__ = ["RolloutBatch", "Sample"]
