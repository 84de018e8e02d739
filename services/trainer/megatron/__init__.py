"""The Megatron-Core side of the trainer: model, weights, optimizer, schedule and checkpoints of one role.

Importing this package makes ``megatron.core`` importable on a machine without CUDA (see :mod:`.cpu`), so every module of
it may import ``megatron.core`` at its top. No other package of the trainer does.
"""

import warnings

from services.trainer.megatron.cpu import install

# Megatron warns once a module and rank, of nothing that this trainer would use differently.
warnings.filterwarnings("ignore", message=r"(Transformer Engine and Apex are|Apex is) not installed")

# ``"cuda"`` or ``"cpu"``: the device on which Megatron-Core was set up when this process first imported the package
DEVICE_TYPE = install()
