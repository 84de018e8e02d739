"""Which processes an SGLang engine will start, and with which variables: so that they can be begun before SGLang is imported.

A guess that is wrong costs time, not correctness: what does not fit is found when SGLang starts the process
(`services.rollout.engine.early_processes`).
"""

from collections.abc import Sequence

from services.rollout.engine.flag_values import DATA, NODES, PIPELINE, TENSOR, engine_flags, flag_number

SCHEDULER = "sglang.srt.managers.scheduler"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"

EXPECTED_VARIABLES = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "CUTE_DSL_LOG_LEVEL": "30",
    "CUTE_DSL_LOG_TO_CONSOLE": "1",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "0",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0",
    "SGLANG_ENABLE_TORCH_COMPILE": "0",
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
    "TRTLLM_ENABLE_PDL": "1",
}
"""What SGLang sets for its processes, unless flags ask for something else. Some are read while its modules are imported."""

LATE_VARIABLES = frozenset(
    {
        "CUDA_MODULE_LOADING",  # "AUTO" from SGLang 0.5.16, "LAZY" from torch: the same since CUDA 12.2
        "NCCL_ALGO",
        "NCCL_CUMEM_ENABLE",
        "NCCL_GRAPH_MIXING_SUPPORT",
        "NCCL_GRAPH_REGISTER",
        "NCCL_MAX_NCHANNELS",
        "NCCL_MIN_NCHANNELS",
        "NCCL_NVLS_ENABLE",
        "SGLANG_OPT_FP8_WO_A_GEMM",  # read by one model's module, and models' modules are imported by running schedulers
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2",
        "SGLANG_RUN_ID",
    }
)
"""What SGLang sets only after it has read its flags, and reads, or lets NCCL read, only when an engine's process runs."""

OTHERWISE = frozenset(
    {
        "config",  # a file that may say anything
        "elastic-ep-join-mode",  # a controller starts the schedulers, as with data parallelism
        "enable-memory-saver",  # it must be loaded before anything else
        "encoder-only",
        "grpc-mode",
        "numa-node",  # another executable binds memory to the node
        "smg-grpc-mode",
        "use-ray",
    }
)
"""The flags with which no process can be begun early."""


def early_modules(arguments: Sequence[str]) -> list[str]:
    """Returns the modules of the processes that SGLang will start on this node, in their order; none where that is not known.

    Args:
        arguments: the flags of ``sglang.launch_server``.
    """
    flags = engine_flags(arguments)
    try:
        tensor, pipeline, data, nodes = (flag_number(flags, names) for names in (TENSOR, PIPELINE, DATA, NODES))
        rank, detokenizers = flag_number(flags, ("node-rank",), 0), flag_number(flags, ("detokenizer-worker-num",))
    except ValueError:
        return []  # SGLang will tell
    if OTHERWISE & flags.keys() or data > 1 or nodes < 1:
        return []
    schedulers = max(tensor * pipeline // nodes, 1)
    return [SCHEDULER] * schedulers + ([DETOKENIZER] if rank == 0 and detokenizers == 1 else [])
