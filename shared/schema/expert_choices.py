"""The experts that an engine chose for a sample's tokens, as they travel with it (rollout routing replay).

Row t belongs to the forward pass of token t, which predicts token t + 1. A sequence's last token is never computed by the engine, so a
sample of T tokens has T - 1 rows.
"""

import base64
import binascii
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.model.architecture import Architecture

Choices = NDArray[np.int16]
"""int16 [T - 1, layers with experts, experts a token]."""


@dataclass(frozen=True)
class ExpertChoices:
    """What a model's choices look like.

    Args:
        layers: indices of the layers with experts. total: all layers. per_token: experts that each token goes through in a layer.
        count: experts of a layer.
    """

    layers: tuple[int, ...]
    total: int
    per_token: int
    count: int

    @classmethod
    def of(cls, architecture: Architecture) -> "ExpertChoices | None":
        """Returns those of a model; None for one without experts."""
        if architecture.experts is None:
            return None
        layers = tuple(index for index in range(architecture.num_layers) if architecture.is_moe_layer(index))
        return cls(layers, architecture.num_layers, architecture.experts.per_token, architecture.experts.count)

    def read(self, encoded: str, rows: int) -> Choices:
        """Returns an engine's answer: base64 of int32 [rows, all layers, experts a token], of which layers without experts are left out.

        Raises ValueError: another size than ``rows`` asks for, or an expert that there is not.
        """
        try:
            flat = np.frombuffer(base64.b64decode(encoded, validate=True), "<i4")
        except (binascii.Error, ValueError, TypeError) as error:
            raise ValueError(f"experts that cannot be read: {error}") from None
        return self.taken(flat, rows)

    def taken(self, given: NDArray[np.integer], rows: int) -> Choices:
        """Returns choices of ``rows`` tokens from integers in that order, of all layers or of those with experts. Raises ValueError."""
        token = self.total * self.per_token
        if given.size == rows * len(self.layers) * self.per_token:
            found = given.reshape(rows, len(self.layers), self.per_token)
        elif given.size == rows * token:
            found = given.reshape(rows, self.total, self.per_token)[:, self.layers]
        else:
            raise ValueError(f"{given.size} experts for {rows} tokens, {self.total} layers and {self.per_token} experts a token")
        if found.size and not (int(found.min()) >= 0 and int(found.max()) < self.count):
            raise ValueError(f"experts from {found.min()} to {found.max()}; the model's are 0 to {self.count - 1}")
        return np.ascontiguousarray(found, np.int16)

    def problem(self, given: Choices | None, rows: int) -> str | None:
        """Returns why these are not the choices of ``rows`` tokens; None where they are."""
        if given is None:
            return f"routed_experts are missing: use_rollout_routing_replay trains {rows} tokens through the experts that the engine chose"
        wanted = (rows, len(self.layers), self.per_token)
        if given.shape != wanted:
            return (
                f"routed_experts has the shape {list(given.shape)}; expected {list(wanted)}: tokens but the last, layers, experts a token"
            )
        if given.size and not (int(given.min()) >= 0 and int(given.max()) < self.count):
            return f"routed_experts holds {given.min()} to {given.max()}; the model's experts are 0 to {self.count - 1}"
        return None


def routed_problem(given: object) -> str | None:
    """Returns why something is no array of choices of any model; None where it is one."""
    if given is None or (isinstance(given, np.ndarray) and given.ndim == 3 and given.dtype == np.int16):
        return None
    return "routed_experts is not an array of int16 [tokens, layers, experts a token]"
