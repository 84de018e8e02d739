"""What only SGLang knows: its rank and its model. Its names for them differ between releases."""

from __future__ import annotations

MOVED = (ImportError, AttributeError, KeyError, RuntimeError, ValueError)
"""What asking for a name raises in a release that has it elsewhere."""


def rank() -> int:
    """This process's rank in the engine's tensor parallelism."""
    try:
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)
    except MOVED:
        from sglang.srt.distributed import get_tensor_model_parallel_rank

        return int(get_tensor_model_parallel_rank())


def model_path() -> str | None:
    """The checkpoint that the engine was launched with; None where it cannot be told."""
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
