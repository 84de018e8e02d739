"""SGLang's way in: it calls `load` by its dotted name (``--custom-weight-loader``) with the model, on the scheduler's thread."""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.rollout.engine.receiver.command_session import CommandSession
from services.rollout.engine.receiver.receiver import Receiver
from shared.runtime import failures

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "MYXO_RECEIVER"
"""Names the private directory in which each rank opens its socket."""

SWITCH_SECONDS = 1e-4
"""How long the scheduler's thread keeps the interpreter from the receiver's. It spins while there is nothing to do; at Python's own 5 ms,
which a command waits for several times, commands took 10 to 90 ms to get through on a GPU."""

MOVED = (ImportError, AttributeError, KeyError, RuntimeError, ValueError)
"""What asking for a name raises in a release of SGLang that has it elsewhere."""

_session: CommandSession | None = None


def load(model: Any, tensors: Iterable[object]) -> None:
    """Has the next command that waits done with this model; the first call opens the socket instead. ``tensors``: ignored.

    Never raises: SGLang's scheduler would end with it. What goes wrong is the answer to the command.
    """
    global _session
    try:
        if _session is None:
            failures.arm()  # an engine whose receiver is gone would serve old weights for ever
            device = next(model.parameters()).device
            _session = CommandSession(Path(os.environ[DIRECTORY_VARIABLE]), Receiver(model, _rank(), device, _model_path()))
            _session.open()
            sys.setswitchinterval(SWITCH_SECONDS)
        else:
            _session.work()
    except Exception:
        log.exception("the receiver of weights failed")


def _rank() -> int:
    """Returns this process's rank in the engine's tensor parallelism."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)
    except MOVED:
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())


def _model_path() -> str | None:
    """Returns the checkpoint that the engine was launched with; None where it cannot be told."""
    try:
        from sglang.srt.runtime_context import get_model

        return str(get_model().model_path)
    except MOVED:
        pass
    try:
        from sglang.srt.server_args import get_global_server_args

        return str(get_global_server_args().model_path)
    except MOVED:
        return None
