"""The engine's own side of a push, inside each of its scheduler processes. SGLang calls `load` by its dotted name.

===============  ==================================================================================================
``session``      the socket that orders come by, and the queue of those that need the scheduler's thread
``receiver``     what it knows of its weights: joining channels, receiving, checking
``wire``         what carries buckets here: the protocol of its kinds, how long they may be waited for
``group``        the wire over a process group (gloo, NCCL)
``plan``         how the bytes of a bucket get into the model's parameters: traced once, replayed from then on
``sglang``       the few questions that only SGLang can answer
===============  ==================================================================================================
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.rollout.engine.receiver.command_session import CommandSession

log = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "MYXO_RECEIVER"
"""Names the private directory in which each rank opens its socket."""

SWITCH_SECONDS = 1e-4
"""How long the scheduler's thread keeps the interpreter from the receiver's. It spins while there is nothing to do; at Python's own 5 ms,
which an order waits for several times, orders took 10 to 90 ms to get through on a GPU."""

_session: CommandSession | None = None


def load(model: Any, tensors: Iterable[object]) -> None:
    """Has the next order that waits done with this model; the first call opens the socket instead. ``tensors``: ignored.

    Never raises: SGLang's scheduler would end with it. What goes wrong is the answer to the order.
    """
    global _session
    try:
        if _session is None:
            from services.rollout.engine.receiver.command_session import CommandSession
            from services.rollout.engine.receiver.receiver import Receiver
            from services.rollout.engine.receiver.sglang import model_path, rank
            from shared.runtime import failures

            failures.arm()  # an engine whose receiver is gone would serve old weights for ever
            directory = os.environ[DIRECTORY_VARIABLE]
            own = rank()
            device = next(model.parameters()).device
            _session = CommandSession(Path(directory), own, Receiver(model, own, device, model_path()))
            _session.open()
            sys.setswitchinterval(SWITCH_SECONDS)
        else:
            _session.work()
    except Exception:
        log.exception("the receiver of weights failed")
