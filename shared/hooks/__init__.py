"""Custom functions under slime's signatures: their loading, their arguments and their results."""

from shared.hooks.arguments import Arguments
from shared.hooks.filters import DynamicFilterOutput, nonzero_std
from shared.hooks.hook_sample import HookSample, Sample, Status
from shared.hooks.loading import HookFailed, load, paths

__all__ = ["Arguments", "DynamicFilterOutput", "HookFailed", "HookSample", "Sample", "Status", "load", "nonzero_std", "paths"]
