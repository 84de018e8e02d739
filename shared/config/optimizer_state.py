"""How the optimizer's state is kept, as Megatron's flags say: its dtypes, and whether it lies in host memory."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shared.runtime.errors import ConfigError

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of an element."""

_DTYPES = {"main_params_dtype": ("fp32", "fp16"), "exp_avg_dtype": tuple(BYTES), "exp_avg_sq_dtype": tuple(BYTES)}
"""The flags of the state's dtypes, in the order main weights, first and second moments, and what they may be."""


@dataclass(frozen=True)
class OptimizerState:
    """The keeping of the optimizer's state.

    Args:
        dtypes: of main weights, first and second moments. main_grads: of the gradient buffers.
        offload_fraction: share of the elements whose state lies in host memory.
        overlap: whether it comes and goes while others are computed.
    """

    dtypes: tuple[str, str, str] = ("fp32", "fp32", "fp32")
    main_grads: str = "fp32"
    offload_fraction: float = 0.0
    overlap: bool = False

    FLAGS: ClassVar[tuple[str, ...]] = (
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "overlap_cpu_optimizer_d2h_h2d",
        "use_torch_optimizer_for_cpu_offload",
        "pin_cpu_grads",
        "pin_cpu_params",
        "use_precision_aware_optimizer",
        "main_grads_dtype",
        *_DTYPES,
    )
    """The flags that this is read from."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "OptimizerState | None":
        """Returns what flags say, name → value; None where Megatron's plain optimizer is meant."""
        if not given.get("optimizer_cpu_offload") and not given.get("use_precision_aware_optimizer"):
            return None
        main, first, second = (str(given.get(name) or "fp32") for name in _DTYPES)
        fraction = float(given.get("optimizer_offload_fraction", 1.0)) if given.get("optimizer_cpu_offload") else 0.0
        overlap = bool(given.get("overlap_cpu_optimizer_d2h_h2d"))
        return cls((main, first, second), str(given.get("main_grads_dtype") or "fp32"), fraction, overlap)

    @property
    def state_bytes(self) -> int:
        """Returns the bytes of main weight and moments of an element."""
        return sum(BYTES[name] for name in self.dtypes)


def problems(given: Mapping[str, Any], train_dtype: str, distributed: bool) -> Iterator[ConfigError]:
    """Yields the flags of the optimizer's state that do not go together, or with the rest of [trainer]."""
    aware, offloads = given.get("use_precision_aware_optimizer"), given.get("optimizer_cpu_offload")
    for name in ("main_grads_dtype", *_DTYPES):
        if given.get(name, "fp32") != "fp32" and not aware:
            yield ConfigError(f"trainer.megatron.{name}", given[name], "fp32, or use_precision_aware_optimizer beside it")
    for name in ("optimizer_offload_fraction", "overlap_cpu_optimizer_d2h_h2d"):
        if given.get(name) and not offloads:
            yield ConfigError(f"trainer.megatron.{name}", given[name], "not given, or optimizer_cpu_offload beside it")
    fraction = given.get("optimizer_offload_fraction")
    if fraction is not None and not 0 <= fraction <= 1:
        yield ConfigError("trainer.megatron.optimizer_offload_fraction", fraction, "a share from 0 to 1")
    for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        if given.get(name) and not distributed:
            yield ConfigError(f"trainer.megatron.{name}", True, "use_distributed_optimizer beside it")
        if given.get(name) and train_dtype != "bfloat16":
            yield ConfigError(f"trainer.megatron.{name}", True, "train_dtype = bfloat16: in float32 the weights are the optimizer's own")
