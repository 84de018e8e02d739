"""A hook of the trainer by which its steps take time and none of the processor, so that a run leaves the machine to those who look at it.

It is mounted into the trainer's container, where it is a module of its own.
"""

import time

PAUSE_SECONDS = 2.0


def wait(*_: object) -> None:
    """Called before each optimizer step; slime's ``custom_megatron_before_train_step_hook_path``."""
    time.sleep(PAUSE_SECONDS)
