"""The reward service: scores what arrives on its environment's queue, with verifiers in processes that can be killed."""
