"""What a model is, as its Hugging Face checkpoint says, and what the ranks of a layout can share of it: all that needs no torch.

The trainer builds models by it; the checks before a start refuse by the same rules what the trainer would refuse.
"""
