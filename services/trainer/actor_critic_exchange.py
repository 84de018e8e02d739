"""The exchange of actor and critic through the store: values of response tokens, and the step of each role's newest checkpoint.

The critic writes the values of each step's tokens, the actor the KL penalty of the reward. A step's tensors stay until the role that
reads them has a checkpoint beyond the step: a role that resumes reads the very tensors that it had.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import redis
import torch
from redis.exceptions import ResponseError
from torch import Tensor

from shared.bus.subjects import Subjects
from shared.runtime.errors import DeadlineExceeded, PayloadMissing
from shared.store.payload_store import AWAY, DEMOTED, StoreFull, StoreRefused, full_reason, options

Kind = Literal["values", "kl"]
Role = Literal["actor", "critic"]
Result = TypeVar("Result")

CALL_SECONDS = 60.0
RETRY_SECONDS = 0.2
READER: dict[Kind, Role] = {"values": "actor", "kl": "critic"}
# The field of a step's hash that marks that every rank has written. It differs from samples' names, which have a slash
_COMPLETE = "complete"


class ActorCriticExchange:
    """One rank's side of the exchange. Calls have a deadline of `CALL_SECONDS` and raise DeadlineExceeded, StoreFull or StoreRefused."""

    def __init__(self, url: str, run: str) -> None:
        self._client: Any = redis.Redis.from_url(url, **options(url))
        self._names = Subjects(run)
        self._freed_below: dict[Kind, int] = {"values": 0, "kl": 0}

    def write(self, kind: Kind, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes a rank's samples, [R] by name. Skips steps that the reader has already saved: no one would free their tensors."""
        if tensors and step >= self.saved(READER[kind]):
            fields = {name: tensor.float().numpy().astype("<f4").tobytes() for name, tensor in tensors.items()}
            self._retry(f"writing the {kind} of step {step}", lambda: self._client.hset(self._key(kind, step), mapping=fields))

    def finish(self, kind: Kind, step: int) -> None:
        """Marks the step as complete. One rank calls it, once all ranks have written."""
        if step >= self.saved(READER[kind]):
            self._retry(f"finishing the {kind} of step {step}", lambda: self._client.hset(self._key(kind, step), _COMPLETE, b"1"))

    def complete(self, kind: Kind, step: int) -> bool:
        """Returns whether the tensors of all ranks are there."""
        return bool(self._retry(f"looking for the {kind} of step {step}", lambda: self._client.hexists(self._key(kind, step), _COMPLETE)))

    def read(self, kind: Kind, step: int, names: Sequence[str]) -> list[Tensor]:
        """Returns float32 [R] for each sample. Raises PayloadMissing naming the first that is not there."""
        if not names:
            return []
        blobs = self._retry(f"reading the {kind} of step {step}", lambda: self._client.hmget(self._key(kind, step), list(names)))
        for name, blob in zip(names, blobs, strict=True):
            if blob is None:
                raise PayloadMissing(f"the store holds no {kind} of sample {name}, step {step}")
        return [torch.from_numpy(np.frombuffer(blob, "<f4").astype(np.float32)) for blob in blobs]

    def forget(self, kind: Kind, below: int) -> None:
        """Frees the tensors of earlier steps. The reader calls it once it has saved a checkpoint of so many steps and published that."""
        if keys := [self._key(kind, step) for step in range(self._freed_below[kind], below)]:
            self._retry(f"freeing the {kind} of {below} steps", lambda: self._client.unlink(*keys))
            self._freed_below[kind] = below

    def save(self, role: Role, steps: int) -> None:
        """Publishes that a role has a checkpoint of so many steps."""
        self._retry(f"writing the {role}'s checkpoint", lambda: self._client.set(self._names.exchange_key("saved", role), steps))

    def saved(self, role: Role) -> int:
        """Returns the steps of a role's newest checkpoint; 0 while there is none."""
        return int(self._retry(f"reading the {role}'s checkpoint", lambda: self._client.get(self._names.exchange_key("saved", role))) or 0)

    def close(self) -> None:
        self._client.close()

    def _key(self, kind: Kind, step: int) -> str:
        return self._names.exchange_key(kind, str(step))

    def _retry(self, what: str, call: Callable[[], Result]) -> Result:
        end = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return call()
            except AWAY as error:
                if time.monotonic() + RETRY_SECONDS > end:
                    raise DeadlineExceeded(what, "the store", CALL_SECONDS, f"given up ({error})") from error
                if isinstance(error, DEMOTED):
                    self._client.connection_pool.disconnect()
            except ResponseError as error:
                if not (reason := full_reason(error)):
                    raise StoreRefused(f"the store refuses {what}: {error}") from error
                if time.monotonic() + RETRY_SECONDS > end:
                    raise StoreFull(f"{what}: {reason}; no room within {CALL_SECONDS:g} s, given up") from error
            time.sleep(RETRY_SECONDS)
