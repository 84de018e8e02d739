"""Runs a user's source of prompts in a process of its own: one that blocks, crashes or calls ``sys.exit`` costs a prompt, not the buffer.

``python -m shared.data.source_process`` speaks in `shared.process.frames`. In, once: ``{"config": JSON}``; out: ``{"states": whether it
has them, "observes": whether it hears results}`` or ``{"refused": text}``. Then in: ``{"verb": "load", "state": value}``,
``{"verb": "skip", "n": count}``, ``{"verb": "observe", "results": list}`` or ``{"verb": "draw"}``; out: ``{"entry": one prompt,
"state": value}``, ``{}``, ``{"failed": text}`` of an observation that raised, or ``{"refused": text}``, after which the process ends.
"""

import select
import sys
import time
import traceback
from typing import Any

from shared.config.run_config import RunConfig
from shared.data.slime_source import opened
from shared.hooks import loading
from shared.process import frames
from shared.process.child_process import ChildProcess
from shared.process.frames import FrameStream
from shared.process.worker_pool import worker_environment
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import error_text

FIELD = "data.data_source"

START_SECONDS, ANSWER_SECONDS, OBSERVE_SECONDS = 120.0, 60.0, 10.0
"""The deadlines for the process to import the source and make it, for one answer of it, and for it to hear results."""

SKIPPED_AT_ONCE = 256

_HEAD = 4


class SourceProcess:
    """The service's end: blocking calls. Raises ConfigError, here and in every call, with the process ended, for a source that fails."""

    def __init__(self, config: RunConfig) -> None:
        self._path = str(config.data.data_source)
        environment = worker_environment(config.reward.worker_environment)
        self._process = ChildProcess("source of prompts", [sys.executable, "-m", __name__], None, environment, watchdog=True)
        made = self._ask({"config": config.model_dump_json()}, START_SECONDS)
        self.has_states, self.observes = bool(made["states"]), bool(made["observes"])

    def load_state(self, state: Any) -> None:
        """Continues after a prompt whose `draw` gave this state."""
        self._ask({"verb": "load", "state": state})

    def skip(self, count: int) -> None:
        """Draws prompts and forgets them."""
        for first in range(0, count, SKIPPED_AT_ONCE):
            self._ask({"verb": "skip", "n": min(SKIPPED_AT_ONCE, count - first)})

    def draw(self) -> tuple[dict[str, Any], Any]:
        """Returns the next prompt as a row, and the source's state behind it, None where it has none."""
        answer = self._ask({"verb": "draw"})
        return answer["entry"], answer["state"]

    def observe(self, results: list[dict[str, Any]]) -> str | None:
        """Tells the source results; returns what it raised over them, if anything."""
        failed: str | None = self._ask({"verb": "observe", "results": results}, OBSERVE_SECONDS).get("failed")
        return failed

    def close(self) -> None:
        """Ends the process."""
        self._process.stop(0)

    def _ask(self, request: dict[str, Any], given_s: float | None = None) -> dict[str, Any]:
        seconds = given_s or ANSWER_SECONDS
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(frames.frame(request))
            self._process.stdin.flush()
            end = time.monotonic() + seconds
            size = int.from_bytes(self._read(_HEAD, end, seconds), "big")
            answer: dict[str, Any] = frames.codec.unpack(self._read(min(size, frames.LONGEST), end, seconds))
        except (OSError, EOFError):
            self.close()
            raise self._refused("its process ended; its last words are in the buffer's log") from None
        except BaseException:
            self.close()
            raise
        if "refused" in answer:
            self.close()
            raise self._refused(str(answer["refused"]))
        return answer

    def _read(self, size: int, end: float, seconds: float) -> bytes:
        stdout, data = self._process.stdout, b""
        assert stdout is not None
        while len(data) < size:
            ready, _, _ = select.select([stdout], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise self._refused(f"it did not answer within {seconds:g} s; its process was killed")
            if not (more := stdout.read1(size - len(data))):  # type: ignore[attr-defined]
                raise EOFError
            data += more
        return data

    def _refused(self, expected: str) -> ConfigError:
        return ConfigError(FIELD, self._path, expected)


def main() -> None:
    """Answers until the service is gone."""
    channel = FrameStream()
    config = RunConfig.model_validate_json(channel.receive()["config"])
    try:
        source = opened(loading.load(FIELD, str(config.data.data_source)), config)
        channel.send({"states": source.has_states, "observes": source.observes})
        while True:
            channel.send(source.answer(channel.receive()))
    except (Exception, SystemExit) as error:  # it is the user's code
        traceback.print_exc()
        words = error.expected if isinstance(error, ConfigError) else error_text(error)
        channel.send({"refused": words})


if __name__ == "__main__":
    main()
