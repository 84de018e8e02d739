"""The user's own functions, under slime's signatures: how they are loaded, what they are given, what they give back."""

from shared.hooks.arguments import Arguments
from shared.hooks.filters import DynamicFilterOutput, nonzero_std
from shared.hooks.loading import HookFailed, load, paths
from shared.hooks.sample import Sample, Status

__all__ = ["Arguments", "DynamicFilterOutput", "HookFailed", "Sample", "Status", "load", "nonzero_std", "paths"]
