"""Sources of prompts for tests that adapt: each prompt shows everything that the source had heard before it."""

import hashlib
import json
import os
import time
from typing import Any

from shared.config.run_config import RunConfig
from shared.data.source_process import opened
from shared.runtime.errors import ConfigError


class Hearing:
    """Prompts that hold a digest of the results heard so far, call by call, and of the prompts drawn in between."""

    def __init__(self, config: RunConfig) -> None:
        self.heard, self.count, self.calls = "", 0, 0

    def get_samples(self, n: int) -> list[dict[str, Any]]:
        drawn = []
        for _ in range(n):
            self.heard = hashlib.sha256(f"{self.heard}.".encode()).hexdigest()[:12]
            drawn.append({"prompt": self.heard, "label": "1", "metadata": {"heard": self.count, "process": os.getpid()}})
        return drawn

    def observe(self, results: list[dict[str, Any]]) -> None:
        heard = [{**result, "metadata": result["metadata"]["heard"]} for result in results]
        self.heard = hashlib.sha256((self.heard + json.dumps(heard)).encode()).hexdigest()[:12]
        self.count += len(results)
        self.calls += 1


class Remembering(Hearing):
    """The same with states."""

    def state(self) -> list[Any]:
        return [self.heard, self.count, self.calls]

    def load_state(self, state: list[Any]) -> None:
        self.heard, self.count, self.calls = state


class Raising(Remembering):
    """Raises over its second call of observe, before it has heard anything of it."""

    def observe(self, results: list[dict[str, Any]]) -> None:
        self.calls += 1
        if self.calls == 2:
            raise ValueError("I will not\nhear this")
        super().observe(results)
        self.calls -= 1


class Hanging(Remembering):
    """Hangs over the result of group 1."""

    def observe(self, results: list[dict[str, Any]]) -> None:
        if any(result["number"] == 1 for result in results):
            time.sleep(600)
        super().observe(results)


class Deaf(Remembering):
    """Ends its process over whatever it hears."""

    def observe(self, results: list[dict[str, Any]]) -> None:
        os._exit(3)


class Async(Hearing):
    """Observes in a coroutine, which nobody would await."""

    async def observe(self, results: list[dict[str, Any]]) -> None:  # type: ignore[override]
        raise AssertionError


class SourceInProcess:
    """A source's process without the process: for histories by the hundred. ``fatal``: positions of calls that end it, of all lives."""

    def __init__(self, config: RunConfig, made: Any) -> None:
        self._source = opened(made, config)
        self.has_states, self.observes = self._source.has_states, self._source.observes

    def load_state(self, state: Any) -> None:
        self._source.answer({"verb": "load", "state": json.loads(json.dumps(state))})

    def skip(self, count: int) -> None:
        self._source.answer({"verb": "skip", "n": count})

    def draw(self) -> tuple[dict[str, Any], Any]:
        answer = self._source.answer({"verb": "draw"})
        return answer["entry"], answer["state"]

    def observe(self, results: list[dict[str, Any]]) -> str | None:
        try:
            failed: str | None = self._source.answer({"verb": "observe", "results": results}).get("failed")
        except ProcessLookupError:
            raise ConfigError("data.data_source", "a source", "its process ended") from None
        return failed

    def close(self) -> None:
        pass
