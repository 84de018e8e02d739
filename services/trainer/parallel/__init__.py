"""What the ranks of a role share, whichever backend computes: their meeting, likelihoods, exports, checkpoints, offload.

Nothing here imports a backend. A backend gives its parallel groups to `runtime.start`, and its model to the others (`.trained_model`).
"""

import torch

DEVICE_TYPE = "cuda" if torch.cuda.is_available() else "cpu"  # PyTorch's name; AMD's GPUs have it too

if DEVICE_TYPE == "cuda":
    # Both backends compile activations. Past eight variants (of shapes, of gradients or none) PyTorch runs them uncompiled, and rounds
    # differently: the same weights then score the same tokens a little differently.
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = 64
