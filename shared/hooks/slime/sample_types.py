"""``slime.utils.types``: the sample."""

from shared.hooks.hook_sample import HookSample as Sample

__all__ = ["Sample"]
