"""The architecture of a model, from its Hugging Face checkpoint, and its division among the ranks of a layout, without torch.

The trainer builds models from it; the checks before a start apply the same rules as the trainer.
"""
