"""What the log of commands comes to, for the endpoint: outcomes that are waited for, saved weights, samplers, and the use of tenants, whose
keys and quotas are here too."""

import asyncio
import hmac
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from shared.formats.request import Status, TurnRefused
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import is_plain_name, parse_json
from shared.schema.messages import MAKES, TENANT, Command, CommandOutcome, LogEntry, is_expired

KEY_VARIABLE, DEFAULT = "MYXO_TINKER_KEY", "default"
FORM = r"^(tml-|eyJ)[\x21-\x7e]{16,}$"  # the SDK takes no others


class Tenant(BaseModel):
    """One tenant. ``tokens``: that it may train and sample in all. ``models``: that it may hold at once. ``bytes``: of weights that it may
    have saved. None: no bound."""

    model_config = ConfigDict(extra="forbid")

    key: str = Field(pattern=FORM)
    tokens: int | None = Field(default=None, ge=0)
    models: int | None = Field(default=None, ge=0)
    bytes: int | None = Field(default=None, ge=0)


_TENANTS = TypeAdapter(dict[Annotated[str, Field(pattern=rf"^{TENANT}$")], Tenant])


def read_tenants(path: Path | None, environment: Mapping[str, str] = os.environ) -> dict[str, Tenant]:
    """Returns the tenants by name. ``path``: their file; None: one, by the environment's key. Raises ConfigError."""
    if path is None:
        if not re.match(FORM, key := environment.get(KEY_VARIABLE, "")):
            expected = "required without tinker.tinker_tenants: a key that begins with tml-, of 20 characters or more; clients give it as "
            raise ConfigError(KEY_VARIABLE, "*" * len(key), expected + "TINKER_API_KEY")
        return {DEFAULT: Tenant(key=key)}
    try:
        found = _TENANTS.validate_python(parse_json(path.read_bytes()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        raise ConfigError("tinker.tinker_tenants", f"{path}: {'.'.join(map(str, first['loc']))}", first["msg"]) from None
    except (OSError, ValueError) as error:
        raise ConfigError("tinker.tinker_tenants", str(path), f"a readable JSON object, name → key and quotas ({error})") from None
    if not found or len({tenant.key for tenant in found.values()}) < len(found):
        raise ConfigError("tinker.tinker_tenants", str(path), "at least one tenant, each with a key of its own")
    return found


def owner(tenants: Mapping[str, Tenant], key: str) -> str | None:
    """Returns the name of the tenant whose key this is; it takes the same time for every wrong one."""
    matches = [name for name, tenant in tenants.items() if hmac.compare_digest(tenant.key.encode(), key.encode(errors="replace"))]
    return matches[0] if matches else None


PREFIX = "tinker://"
ONE_CLIENT = "the whole model is trained here, of one client at a time (trainer.lora_rank is not set)"
MADE_BY = {"weights": "save_state", "sampler_weights": "save_weights_for_sampler"}


class WrongRequest(TurnRefused):
    """A request that is wrong for what it asks. Half a surrogate pair in it, which no answer could hold, is written out."""

    def __init__(self, text: str, status: Status = 400) -> None:
        super().__init__(status, text.encode(errors="backslashreplace").decode())


def wrong(name: str, given: object, expected: str) -> WrongRequest:
    """Returns the refusal of a field."""
    return WrongRequest(f"{name}: {str(given)[:200]}; expected {expected}")


class CommandBook:
    """The log so far.

    Attributes:
        commands, outcomes: by key. samplers: sampling session → path of its weights, None: the base. models: those that are there, with
            what made each or is to unload it. waiting: a client's commands without an outcome. newest: its newest number. coming: commands
            on their way into the log.
    """

    def __init__(self) -> None:
        self.commands, self.outcomes = dict[tuple[str, int], Command](), dict[tuple[str, int], CommandOutcome]()
        self.samplers, self.models = dict[str, str | None](), dict[str, Command]()
        self._used, self.newest, self.waiting = Counter[str](), Counter[str](), Counter[str]()
        self.coming = dict[tuple[str, int], Command]()
        self._saved, self._taken = dict[str, CommandOutcome](), dict[str, tuple[str, int]]()
        self._awaited: dict[tuple[str, int], asyncio.Event] = {}

    def see(self, entry: LogEntry) -> None:
        """Takes an entry of the log; one that is known changes nothing."""
        if isinstance(entry, Command) and entry.key not in self.commands:
            self.commands[entry.key] = entry
            self.coming.pop(entry.key, None)
            self.newest[entry.client] = max(entry.number, self.newest[entry.client])
            self.waiting[entry.client] += 1
            if not entry.refused:
                self._note_begun(entry, json.loads(entry.arguments))
        elif isinstance(entry, CommandOutcome) and entry.key not in self.outcomes:
            self.outcomes[entry.key] = entry
            self.waiting[entry.client] -= 1
            command = self.commands[entry.key]
            if not command.refused:
                self._note_ended(command, entry, json.loads(command.arguments))
            if (event := self._awaited.pop(entry.key, None)) is not None:
                event.set()

    def _note_begun(self, command: Command, arguments: dict[str, Any]) -> None:
        self._used[command.client.partition("-")[0]] += command.tokens
        if command.verb in MAKES:
            self.models.setdefault(command.client, command)
        elif command.verb == "unload_model" and command.client in self.models:
            self.models[command.client] = command
        elif command.verb == "create_sampling_session":
            self.samplers[command.client] = arguments["path"]
        elif command.verb.startswith("save_weights"):
            self._taken[arguments["path"]] = command.key
            self.samplers |= {sampler: arguments["path"] for sampler in [arguments.get("sampler")] if sampler}
            if not self.is_there(arguments["path"]):
                self._saved.pop(arguments["path"], None)  # expired

    def _note_ended(self, command: Command, outcome: CommandOutcome, arguments: dict[str, Any]) -> None:
        path = arguments.get("path", "")
        if command.verb.startswith("save_weights"):
            if not outcome.error:
                self._saved[path] = outcome
            elif self._taken.get(path) == command.key and path not in self._saved:
                del self._taken[path]
        elif command.verb == "unload_model" or (outcome.error and self.models.get(command.client) is command):
            self.models.pop(command.client, None)

    def is_there(self, path: str) -> bool:
        """Returns whether weights are saved under this path, and have not expired."""
        return path in self._saved and not is_expired(self._saved[path], time.time())

    def is_taken(self, path: str) -> bool:
        """Returns whether weights of this path are saved, or are about to be; of those for sampling also what has expired, since engines
        may hold it."""
        if any(one.verb.startswith("save_weights") and json.loads(one.arguments)["path"] == path for one in self.coming.values()):
            return True
        return path in self._taken and (path not in self._saved or self.is_there(path) or "/sampler_weights/" in path)

    def saved(self, path: str, client: str, kind: str, *, coming: bool = False) -> str:
        """Returns a path of saved weights. ``coming``: also where they are about to be.

        Raises WrongRequest where it is none, or another tenant's: as one that is not there.
        """
        parts = path.removeprefix(PREFIX).split("/")
        if not path.startswith(PREFIX) or len(parts) != 3 or parts[1] not in MADE_BY or not is_plain_name(parts[2]):
            raise wrong("path", path, f"{PREFIX}MODEL/{kind}/NAME")
        if parts[1] != kind:
            raise wrong("path", path, f"{kind}: {MADE_BY[kind]} makes them")
        if parts[0].partition("-")[0] != client.partition("-")[0] or not (self.is_taken(path) if coming else self.is_there(path)):
            raise WrongRequest(f"path: {path}: there are no such weights")
        return path

    def check_free(self, sampler: str) -> None:
        """Raises WrongRequest where a sampling session is there, or is about to be: it would sample from other weights unnoticed."""
        coming = [name for one in self.coming.values() for name in (one.client, json.loads(one.arguments).get("sampler"))]
        if sampler in self.samplers or sampler in coming:
            raise wrong("sampling_session_seq_id", sampler.rpartition(":")[2], "the number of no other sampling session")

    def check_sampler(self, client: str) -> None:
        """Raises WrongRequest where a sampling session's weights are not there."""
        if (path := self.samplers.get(client)) is not None and not self.is_there(path):
            raise WrongRequest(f"sampling_session_id: {client}: its weights, {path}, are not saved, or have expired (ttl_seconds)")

    def check_quotas(self, tenant: str, quotas: Tenant, command: Command, *, whole: bool = False) -> None:
        """Raises WrongRequest where a command takes its tenant over a quota, or, where the whole model trains, is of a second client;
        TurnRefused, so that the SDK asks again, where it waits for an unload alone."""
        used = self._used[tenant] + sum(one.tokens for one in self.coming.values() if one.client.startswith(f"{tenant}-"))
        if quotas.tokens is not None and command.tokens and used + command.tokens > quotas.tokens:
            raise WrongRequest(f"tokens: {command.tokens} more than the {used} that {tenant} has used; its quota is {quotas.tokens}")
        if command.verb in MAKES and not command.number:
            self._check_models(f"{tenant}-", quotas.models, f"its quota is {quotas.models}")
            self._check_models("", 1 if whole else None, ONE_CLIENT)

    def _check_models(self, prefix: str, most: int | None, bound: str) -> None:
        begun = self.models | {one.client: one for one in self.coming.values() if one.verb in MAKES and not one.number}
        held = [one.verb for model, one in begun.items() if model.startswith(prefix)]
        if most is not None and len(held) >= most:
            waits = len(held) - held.count("unload_model") < most
            raise WrongRequest(f"models: {len(held)} are there; {bound}; close a session", 429 if waits else 400)

    def rank_of(self, client: str, most: int) -> int:
        """Returns the rank of a model's adapters, or of what it was loaded from. ``most``: where nothing says it."""
        while (client, 0) in self.commands and (path := (arguments := json.loads(self.commands[client, 0].arguments)).get("path")):
            client = path.removeprefix(PREFIX).split("/")[0]
        return int(arguments.get("rank", most)) if (client, 0) in self.commands else most

    def missing_number(self, client: str) -> int:
        """Returns the first number of a client without a command: what is there of later ones waits for it."""
        return next(number for number in itertools.count() if (client, number) not in self.commands and (client, number) not in self.coming)

    async def outcome(self, key: tuple[str, int], seconds: float) -> CommandOutcome | None:
        """Waits for what becomes of a command; None where that takes longer."""
        if key not in self.outcomes:
            try:
                async with asyncio.timeout(seconds):
                    await self._awaited.setdefault(key, asyncio.Event()).wait()
            except TimeoutError:
                return None
        return self.outcomes[key]
