"""What a gateway asks of a replica, and its answer: token in, token out, MessagePack over HTTP at `DRAW_PATH`.

It is for gateways alone: the request carries a key that replicas and gateways share by the store (`SessionStore.draw_key`).
"""

import numpy as np
from pydantic import Field

from shared.schema.limits import LARGEST, Count
from shared.schema.message import Message, Tokens
from shared.schema.messages import Sampling
from shared.sessions.session import Finish, LogProbs, RequestId, Spans, joined

DRAW_PATH = "/internal/draw"
KEY_HEADER = "X-Myxo-Draw-Key"
CONTENT_TYPE = "application/msgpack"
LENGTH_BYTES = 4
"""Before each piece of an answer that is streamed: its length, in network order."""

CONTEXT_GAUGE, VOCABULARY_GAUGE = "engine_context", "engine_vocabulary"
"""Gauges of a replica's status: the most tokens of one sequence, and the number of token ids."""


class DrawRequest(Message):
    """Draw the tokens that follow ``input_ids``.

    ``seed``: by it and the token's position, in an engine with deterministic inference. ``min_version``: by weights of this version at
    least. ``seconds``: the most it may take. ``stream``: answered by pieces as they are drawn: each is a `Drawn`, and goes on where the one
    before ended; all but the last have ``finish`` ``abort``, as which they count where nothing follows.
    """

    request: RequestId
    input_ids: Tokens
    sampling: Sampling
    seed: int | None = Field(default=None, ge=0, le=LARGEST)
    min_version: Count = 0
    seconds: float = Field(gt=0, le=86400)
    stream: bool = False


class Drawn(Message):
    """What was drawn. ``spans`` tile the completion.

    ``cached``: input tokens whose keys and values were there already. ``retractions``: how often the engine took the request back for want
    of memory.
    """

    completion: Tokens
    log_probs: LogProbs
    spans: Spans
    finish: Finish
    cached: Count = 0
    retractions: Count = 0

    def then(self, piece: "Drawn") -> "Drawn":
        """Returns this with the piece that goes on where it ends."""
        return Drawn(
            completion=np.concatenate([self.completion, piece.completion]),
            log_probs=np.concatenate([self.log_probs, piece.log_probs]),
            spans=joined(self.spans, piece.spans, len(self.completion)),
            finish=piece.finish,
            cached=self.cached,
            retractions=piece.retractions,
        )

    def stopped_at(self, count: int) -> "Drawn":
        """Returns its first ``count`` tokens, as a turn that stops there."""
        spans = tuple((start, min(end, count), version) for start, end, version in self.spans if start < count)
        cut = {"completion": self.completion[:count], "log_probs": self.log_probs[:count], "spans": spans}
        return self.model_copy(update={**cut, "finish": "stop"})

    def framed(self) -> bytes:
        """Returns it as a piece of an answer that is streamed."""
        encoded = self.encode()
        return len(encoded).to_bytes(LENGTH_BYTES) + encoded
