"""The PyTorch-native backend of the trainer: any causal language model of transformers', its parameters sharded by FSDP2."""
