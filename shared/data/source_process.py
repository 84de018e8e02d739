"""Runs a user's source of prompts in a process of its own: one that blocks, crashes or calls ``sys.exit`` costs a prompt, not the buffer.

``python -m shared.data.source_process`` speaks in frames of `shared.process.call_server`. In, once: ``{"config": JSON}``; out: ``{"states":
whether it has them, "observes": whether it hears results}`` or ``{"refused": text}``. Then in: ``{"verb": "load", "state": value}``,
``{"verb": "skip", "n": count}``, ``{"verb": "observe", "results": list}`` or ``{"verb": "draw"}``; out: ``{"entry": one prompt,
"state": value}``, ``{}``, ``{"failed": text}`` of an observation that raised, or ``{"refused": text}``, after which the process ends.
"""

import inspect
import select
import sys
import time
from typing import Any, Protocol

from shared.config.run_config import RunConfig
from shared.hooks import Arguments, loading
from shared.process.call_server import LONGEST_FRAME, FrameStream, frame
from shared.process.child_process import ChildProcess
from shared.process.worker_pool import worker_environment
from shared.runtime.errors import ConfigError
from shared.runtime.tasks import error_text, print_traceback
from shared.schema import codec

RENDERED = "_rendered"  # The key that marks a row whose text is the rendered prompt: sources of slime's apply the chat template themselves
SLIMES = ("get_samples", "add_samples", "save", "load")  # The methods by which a class is known to be in slime's manner


class PromptSource(Protocol):
    """What the process asks. ``has_states``: whether a position can be gone back to. ``observes``: whether it hears results."""

    has_states: bool
    observes: bool

    def answer(self, request: dict[str, Any]) -> dict[str, Any]: ...


def opened(made: Any, config: RunConfig) -> PromptSource:
    """Returns the source that a class in slime's manner, or a function ``make(config)``, makes. Raises ValueError."""
    if inspect.isclass(made) and all(callable(getattr(made, name, None)) for name in SLIMES):
        return SlimeSource(made, config)
    return MadeSource(made(config), config)


class MadeSource:
    """An object with ``get_samples(n)`` and perhaps ``state()`` and ``load_state(value)``, and ``observe(results)``."""

    def __init__(self, source: Any, config: RunConfig) -> None:
        if not hasattr(source, "get_samples"):
            raise ValueError(f"its {type(source).__name__} has no get_samples(n)")
        self._source, self._data = source, config.data
        self.has_states = hasattr(source, "load_state")
        observe = getattr(source, "observe", None)
        self.observes = observe is not None
        if observe is not None and (not callable(observe) or inspect.iscoroutinefunction(observe)):
            raise ValueError(f"the observe of its {type(source).__name__} is no plain method observe(results)")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request of `shared.data.source_process`. Raises ValueError for what is no prompt."""
        match request["verb"]:
            case "load":
                self.load(request["state"])
                return {}
            case "skip":
                self.skip(request["n"])
                return {}
            case "observe":
                return self.observe(request["results"])
        return {"entry": self.draw(), "state": self.state()}

    def load(self, state: Any) -> None:
        self._source.load_state(state)

    def skip(self, count: int) -> None:
        self._source.get_samples(count)

    def observe(self, results: list[dict[str, Any]]) -> dict[str, Any]:
        """Passes results to the source; what it raises costs these results and not the source."""
        try:
            self._source.observe(results)
        except (Exception, SystemExit) as error:
            print_traceback()
            return {"failed": error_text(error)}
        return {}

    def state(self) -> Any:
        return self._source.state() if hasattr(self._source, "state") else None

    def draw(self) -> dict[str, Any]:
        """Returns one prompt as a row with the keys of [data]."""
        samples = given = self._source.get_samples(1)
        while isinstance(given, list) and given:
            given = given[0]
        if not isinstance(samples, list) or given is None or isinstance(given, list):
            raise ValueError(f"get_samples(1) gave {samples!r}; it must give a list of one")
        if isinstance(given, dict):
            return given
        data = self._data
        keys = {"prompt": data.input_key, "label": data.label_key, "metadata": data.metadata_key, "tools": data.tool_key}
        return {key: getattr(given, name) for name, key in keys.items() if key is not None and hasattr(given, name)}


class SlimeSource(MadeSource):
    """An instance of a class in slime's manner."""

    def __init__(self, made: Any, config: RunConfig) -> None:
        directory = config.run.root / "prompts" / "source"
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(made(Arguments(config, save=str(directory), load=str(directory), run_config=config)), config)
        self._batch = config.rollout.rollout_batch_size
        # its files hold a position, and not what it has heard since: one that observes is drawn from and told again
        self._drawn, self.has_states = 0, not self.observes

    def load(self, state: Any) -> None:
        self._drawn, saved = state["drawn"], state["drawn"] // self._batch
        if saved:
            self._source.load(saved)
        super().skip(self._drawn % self._batch)

    def skip(self, count: int) -> None:
        super().skip(count)
        self._drawn += count

    def draw(self) -> dict[str, Any]:
        row = {**super().draw(), RENDERED: True}
        self._drawn += 1
        if self._drawn % self._batch == 0:
            self._source.save(self._drawn // self._batch)
        return row

    def state(self) -> Any:
        return {"drawn": self._drawn}


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
        """Passes results to the source; returns what it raised over them, if anything."""
        failed: str | None = self._ask({"verb": "observe", "results": results}, OBSERVE_SECONDS).get("failed")
        return failed

    def close(self) -> None:
        """Ends the process."""
        self._process.stop(0)

    def _ask(self, request: dict[str, Any], given_s: float | None = None) -> dict[str, Any]:
        seconds = given_s or ANSWER_SECONDS
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(frame(request))
            self._process.stdin.flush()
            end = time.monotonic() + seconds
            size = int.from_bytes(self._read(_HEAD, end, seconds), "big")
            answer: dict[str, Any] = codec.unpack(self._read(min(size, LONGEST_FRAME), end, seconds))
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
    config, made = RunConfig.model_validate_json(channel.receive()["config"]), None
    try:
        made = loading.load(FIELD, str(config.data.data_source))
        source = opened(made, config)
        channel.send({"states": source.has_states, "observes": source.observes})
        while True:
            channel.send(source.answer(channel.receive()))
    except (Exception, SystemExit) as error:  # it is the user's code
        print_traceback()
        words = error.expected if isinstance(error, ConfigError) else error_text(error, made)
        channel.send({"refused": words})


if __name__ == "__main__":
    main()
