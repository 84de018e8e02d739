"""The config of a run: its sections, the flags that set them under slime's, Megatron's and SGLang's names, and their rules."""
