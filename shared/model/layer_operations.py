"""The operations of a model whose outputs engine and trainer are compared by, and the files that hold them.

A file is safetensors, one for each rank of a pass: float32 [T, width] by name, ``embedding``, ``layers.N.OPERATION``, ``final_norm``,
``log_probs`` [T - 1, 1]; ``layers.N.experts`` are int32. A name says of a tensor that is not whole how the ranks' parts make it:
``NAME:columns`` side by side, or ``NAME:rows`` one after the other.
"""

# Of a layer, in the order in which they are computed. The output is the residual stream that the next layer gets.
OPERATIONS = (
    "attention_norm", "q", "k", "v", "attention", "attention_output", "mlp_norm", "router_logits", "experts", "mlp_output", "output",
)  # fmt: skip
ROUNDINGS = 2  # passes of the trainer whose operations are changed at random, by as much as rounding may change them


def names(layers: int) -> list[str]:
    """Returns the names of all operations in the order in which they are computed."""
    return ["embedding", *(f"layers.{index}.{one}" for index in range(layers) for one in OPERATIONS), "final_norm", "log_probs"]
