"""What the log of commands comes to, for the endpoint: outcomes that are waited for, saved weights, samplers, and tenants' use. Pure."""

import asyncio
import json
from collections import Counter
from typing import Any

from shared.schema.client_commands import Command, CommandOutcome, LogEntry

MAKES = ("create_model", "load_weights")


class CommandBook:
    """The log so far.

    Attributes:
        commands, outcomes: by key. samplers: sampling session → path of its weights, None: the base. sizes: bytes by path of saved weights.
        used: tokens by tenant. models: models that are there, with what made each.
    """

    def __init__(self) -> None:
        self.commands, self.outcomes = dict[tuple[str, int], Command](), dict[tuple[str, int], CommandOutcome]()
        self.samplers, self.sizes = dict[str, str | None](), dict[str, int]()
        self.used, self.models = Counter[str](), dict[str, Command]()
        self._awaited: dict[tuple[str, int], asyncio.Event] = {}
        self._taken: dict[str, tuple[str, int]] = {}
        self._newest: Counter[str] = Counter()

    def see(self, entry: LogEntry) -> None:
        """Takes an entry of the log; one that is known changes nothing."""
        if isinstance(entry, Command) and entry.key not in self.commands:
            self.commands[entry.key] = entry
            self._newest[entry.client] = max(entry.number, self._newest[entry.client])
            if not entry.refused:
                self.used[entry.client.partition("-")[0]] += entry.tokens
                self._note_begun(entry)
        elif isinstance(entry, CommandOutcome) and entry.key not in self.outcomes:
            self.outcomes[entry.key] = entry
            if not self.commands[entry.key].refused:
                self._note_ended(self.commands[entry.key], entry)
            if (event := self._awaited.pop(entry.key, None)) is not None:
                event.set()

    def _note_begun(self, command: Command) -> None:
        if command.verb in MAKES and command.client not in self.models:
            self.models[command.client] = command
        elif command.verb == "unload_model":
            self.models.pop(command.client, None)
        elif command.verb == "create_sampling_session":
            self.samplers[command.client] = json.loads(command.arguments)["path"]
        elif command.verb.startswith("save_weights"):
            self._taken[json.loads(command.arguments)["path"]] = command.key

    def _note_ended(self, command: Command, outcome: CommandOutcome) -> None:
        arguments = json.loads(command.arguments)
        if command.verb.startswith("save_weights"):
            if outcome.error:
                if self._taken.get(arguments["path"]) == command.key and arguments["path"] not in self.sizes:
                    del self._taken[arguments["path"]]
                return
            self.sizes[arguments["path"]] = outcome.bytes
            if sampler := arguments.get("sampler"):
                self.samplers[sampler] = arguments["path"]
        elif outcome.error and self.models.get(command.client) is command:
            del self.models[command.client]

    def is_taken(self, path: str) -> bool:
        """Returns whether weights of this path are saved, or are about to be."""
        return path in self._taken

    def next_number(self, client: str) -> int:
        """Returns the number after a client's newest command."""
        return self._newest[client] + 1

    def stored(self, tenant: str) -> int:
        """Returns the bytes of a tenant's saved weights."""
        return sum(size for path, size in self.sizes.items() if path.removeprefix("tinker://").startswith(f"{tenant}-"))

    def held(self, tenant: str) -> list[str]:
        """Returns a tenant's models."""
        return [model for model in self.models if model.startswith(f"{tenant}-")]

    async def outcome(self, key: tuple[str, int], seconds: float) -> CommandOutcome | None:
        """Waits for what becomes of a command; None where that takes longer."""
        if key not in self.outcomes:
            try:
                async with asyncio.timeout(seconds):
                    await self._awaited.setdefault(key, asyncio.Event()).wait()
            except TimeoutError:
                return None
        return self.outcomes[key]

    def described(self, model: str) -> dict[str, Any]:
        """Returns what made a model."""
        return {**json.loads(self.models[model].arguments), "verb": self.models[model].verb}
