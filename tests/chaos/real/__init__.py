"""Whole runs of the tiny model with SGLang and Megatron, as ``myxo up`` starts them."""
