"""Whether sequences of a micro-batch share the computation of their beginnings: only where that is exact.

It is wherever a token's output depends on the tokens before it alone. Megatron's features for which that does not hold (dropout, capacities
of experts) are refused in `[trainer.megatron]` for other reasons; losses that count tokens see whole sequences.
"""

from typing import Literal

from megatron.core.transformer import TransformerConfig

from services.trainer.megatron.expert_balance import Balancing
from shared.runtime.errors import ConfigError

WORTHWHILE = 0.1
"""The share of a micro-batch's tokens that ``auto`` wants saved: below it, kernels for whole sequences may be the faster ones."""


Setting = Literal["auto", "on", "off"]


def least_saved(setting: Setting, config: TransformerConfig) -> float | None:
    """Returns the least share of a micro-batch's tokens that sharing must save; None where nothing is shared.

    Raises ConfigError: ``on``, where it would not be exact.
    """
    reason = obstacle(config)
    if setting == "on" and reason is not None:
        raise ConfigError("trainer.prefix_sharing", setting, f"auto or off: {reason}")
    if setting == "off" or reason is not None:
        return None
    return 0.0 if setting == "on" else WORTHWHILE


def obstacle(config: TransformerConfig) -> str | None:
    """Returns why beginnings are not shared, if nobody has said ``off``; None where they are."""
    if config.context_parallel_size > 1:
        return "context parallelism cuts every sequence into the same number of parts"
    if config.transformer_impl != "local":
        return "Transformer Engine's attention takes whole sequences only"
    if Balancing.of(config) is not None:
        return "the balance of experts counts the tokens of whole sequences"
    return None
