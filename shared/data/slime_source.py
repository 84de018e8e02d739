"""A user's source of prompts, in its own process: what ``make(config)`` gives, or an instance of a class in slime's manner.

A class of slime's keeps its position by ``save(id)`` and ``load(id)``, which write and read files. It is asked to after every batch; a
position in between is the last one saved, and the prompts drawn since.
"""

import inspect
import traceback
from typing import Any, Protocol

from shared.config.run_config import RunConfig
from shared.hooks import Arguments
from shared.runtime.tasks import error_text

RENDERED = "_rendered"
"""The key that marks a row whose text is the rendered prompt: sources of slime's apply the chat template themselves."""

"""The most characters of what an observation raised."""

SLIMES = ("get_samples", "add_samples", "save", "load")
"""The methods by which a class is known to be in slime's manner."""


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
        """Tells the source; what it raises costs these results and not the source."""
        try:
            self._source.observe(results)
        except (Exception, SystemExit) as error:
            traceback.print_exc()
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
