"""What actor and critic tell each other through the store: numbers of response tokens, and how far each has saved.

The critic writes the values of each step's tokens, the actor the KL that the reward is charged with. A step's numbers stay until whoever
reads them has a checkpoint beyond the step: one that resumes reads the very numbers that it had.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import redis
from numpy.typing import NDArray
from redis.exceptions import BusyLoadingError, ConnectionError, ResponseError, TimeoutError

from shared.bus.subjects import Subjects
from shared.runtime.errors import DeadlineExceeded, PayloadMissing
from shared.store.payload_store import StoreRefused, options

Kind = Literal["values", "kl"]
Role = Literal["actor", "critic"]
Result = TypeVar("Result")

CALL_SECONDS = 60.0
RETRY_SECONDS = 0.2

READER: dict[Kind, Role] = {"values": "actor", "kl": "critic"}

_COMPLETE = "complete"
"""Field of a step's hash that says that every rank has written. Samples' names hold a slash."""

_FLOAT32 = np.dtype("<f4")


class ActorCriticExchange:
    """One rank's side. Every call has a deadline of `CALL_SECONDS` and raises DeadlineExceeded or StoreRefused."""

    def __init__(self, url: str, run: str) -> None:
        self._client = redis.Redis.from_url(url, **options(url))
        self._names = Subjects(run)
        self._kept_from: dict[Kind, int] = {"values": 0, "kl": 0}

    def write(self, kind: Kind, step: int, numbers: Mapping[str, NDArray[np.floating]]) -> None:
        """Numbers of a rank's samples, [R] by name. Nothing is written for steps that their reader is past: nobody would free it."""
        if numbers and step >= self.saved(READER[kind]):
            fields: Any = {name: np.asarray(values, dtype=_FLOAT32).tobytes() for name, values in numbers.items()}
            self._until(f"writing the {kind} of step {step}", lambda: self._client.hset(self._key(kind, step), mapping=fields))

    def finish(self, kind: Kind, step: int) -> None:
        """Says that every rank has written. For one rank to call, once they have."""
        if step < self.saved(READER[kind]):
            return
        self._until(f"finishing the {kind} of step {step}", lambda: self._client.hset(self._key(kind, step), _COMPLETE, b"1"))

    def complete(self, kind: Kind, step: int) -> bool:
        """Whether every number of the step is there."""
        return bool(self._until(f"looking for the {kind} of step {step}", lambda: self._client.hexists(self._key(kind, step), _COMPLETE)))

    def read(self, kind: Kind, step: int, names: Sequence[str]) -> list[NDArray[np.float32]]:
        """Numbers by sample, [R]. Raises PayloadMissing naming the first that is not there."""
        if not names:
            return []
        found: Any = self._until(f"reading the {kind} of step {step}", lambda: self._client.hmget(self._key(kind, step), list(names)))
        for name, blob in zip(names, found, strict=True):
            if blob is None:
                raise PayloadMissing(f"the store holds no {kind} of sample {name}, step {step}")
        return [np.frombuffer(blob, _FLOAT32) for blob in found]

    def forget(self, kind: Kind, below: int) -> None:
        """Frees the numbers of steps below; the reader's to call, once it has a checkpoint of so many steps and has said so."""
        keys = [self._key(kind, step) for step in range(self._kept_from[kind], below)]
        if keys:
            self._until(f"freeing the {kind} of {below} steps", lambda: self._client.unlink(*keys))
            self._kept_from[kind] = below

    def save(self, role: Role, steps: int) -> None:
        """Says that a role has a checkpoint of so many steps."""
        self._until(f"telling the {role}'s checkpoint", lambda: self._client.set(self._names.exchange_key("saved", role), steps))

    def saved(self, role: Role) -> int:
        """Steps of a role's newest checkpoint; 0 while there is none."""
        found: Any = self._until(f"asking for the {role}'s checkpoint", lambda: self._client.get(self._names.exchange_key("saved", role)))
        return int(found or 0)

    def close(self) -> None:
        self._client.close()

    def _key(self, kind: Kind, step: int) -> str:
        return self._names.exchange_key(kind, str(step))

    def _until(self, what: str, call: Callable[[], Result]) -> Result:
        end = time.monotonic() + CALL_SECONDS
        while True:
            try:
                return call()
            except (ConnectionError, TimeoutError, BusyLoadingError) as error:
                if time.monotonic() + RETRY_SECONDS > end:
                    raise DeadlineExceeded(what, "the store", CALL_SECONDS, f"given up ({error})") from error
            except ResponseError as error:
                raise StoreRefused(f"the store refuses {what}: {error}") from error
            time.sleep(RETRY_SECONDS)
