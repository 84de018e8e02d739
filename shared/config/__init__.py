"""What a run is: the sections of its config, the flags that set them under slime's, Megatron's and SGLang's names, and their rules."""
