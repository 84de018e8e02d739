"""SGLang's entry point: it calls `load` by its dotted name (``--custom-weight-loader``) with the model, on the scheduler's thread."""

import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from services.rollout.engine.private_endpoints import DIRECTORY_VARIABLE
from services.rollout.engine.receiver.command_session import CommandSession
from services.rollout.engine.receiver.computing_streams import calling_scheduler, computing_streams
from services.rollout.engine.receiver.finish_checks import find_ends_of_aborted, report_token_versions
from services.rollout.engine.receiver.receiver import Receiver
from services.rollout.engine.receiver.scheduler_gate import SchedulerGate
from shared.runtime import tasks

log = logging.getLogger(__name__)

SWITCH_SECONDS = 2e-5
"""The interpreter's switch interval. The scheduler's thread spins, or computes, and delays the receiver's by several intervals for each
command; at Python's default of 5 ms, commands took 10 to 90 ms on a GPU."""

MOVED = (ImportError, AttributeError, KeyError, RuntimeError, ValueError)
"""The exceptions of looking up a name that a release of SGLang has elsewhere."""

_session: CommandSession | None = None


def load(model: Any, tensors: Iterable[object]) -> None:
    """Runs the next queued command with this model; the first call opens the socket instead. ``tensors``: ignored.

    Never raises, since that would end SGLang's scheduler; errors are in the answer to the command.
    """
    global _session
    try:
        if _session is None:
            tasks.arm()  # an engine without a receiver would serve old weights for ever
            device = next(model.parameters()).device
            scheduler, gate = calling_scheduler(), SchedulerGate()
            receiver = Receiver(model, _rank(), device, _model_path(), computing_streams(scheduler), gate.closed)
            gate.install(scheduler)
            if not find_ends_of_aborted(_request_class()):
                log.warning("aborted requests may go on beyond their ends; samples may count as wholly of their oldest version")
            if not hasattr(scheduler, "record_weight_version_change"):  # from 0.5.20 on SGLang does it
                report_token_versions(_request_class(), lambda: receiver.version)
            _session = CommandSession(Path(os.environ[DIRECTORY_VARIABLE]), receiver, gate)
            _session.open()
            sys.setswitchinterval(SWITCH_SECONDS)
        else:
            _session.work()
    except Exception:
        log.exception("the receiver of weights failed")


def _request_class() -> type[Any]:
    """Returns SGLang's class of requests in a scheduler."""
    from sglang.srt.managers.schedule_batch import Req

    return Req


def _rank() -> int:
    """Returns this process's rank in the engine's tensor parallelism."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)
    except MOVED:
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())


def _model_path() -> str | None:
    """Returns the checkpoint that the engine was launched with; None where it is unknown."""
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
