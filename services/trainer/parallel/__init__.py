"""What the ranks of a role share, whichever backend computes: their meeting, likelihoods, exports, checkpoints, offload.

Nothing here imports a backend. A backend gives its parallel groups to `runtime.start`, and its model to the others (`.trained_model`).
"""

import torch

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"  # PyTorch's name; AMD's GPUs have it too
