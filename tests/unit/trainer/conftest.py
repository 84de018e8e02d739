"""Shared by the trainer's unit tests."""

import torch

torch.set_num_threads(1)  # several workers, or ranks, share the machine's cores
