"""Everything that can be wrong with a run's input, found before anything is started.

Each check raises ConfigError: the field, what was given, what would be right.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from redis.exceptions import RedisError

from shared import addresses, flags, hooks
from shared.bus import Bus, BusUnreachable, redacted
from shared.config import RunConfig, load
from shared.demonstrations import DemonstrationFile
from shared.errors import ConfigError
from shared.hub import pins, resolve
from shared.hub.client import Hub
from shared.prompts import PromptFile, TrainingPrompts, eval_prompts, training_prompts
from shared.store import Store, StoreUnreachable
from shared.subjects import Subjects
from shared.tokenizer import Tokenizer

ANSWER_SECONDS = 5.0
"""How long a given NATS or Redis has to answer."""

IMPORT_SECONDS = 120.0
"""How long importing the user's own functions may take."""

LONGEST_LINE = 1000
"""Characters that are shown about prompts that are left out: one may be long."""


def checked_config(path: Path, arguments: list[str], *, fresh: bool = False) -> RunConfig:
    """Reads the config with ``arguments`` (flags of `shared.flags`) laid over it and checks all files it names, line by line.

    Names on the hub are pinned in what is returned, and their files on this machine. Tells on standard error how many prompts are left out,
    where the config leaves some out.

    Args:
        fresh: whether the run of that name begins anew, whatever its names on the hub were pinned to before.
    """
    hub = Hub.of()
    frozen = _pinned(load(path, flags.parse(arguments)), fresh, hub)
    config = resolve.local(frozen, hub=hub)
    config.check_paths()
    tokenizer = Tokenizer(config.model.hf_checkpoint)
    _check_functions(config)
    if config.data.data_source is None:  # the prompts of a source are seen when they are drawn
        _check_prompts(training_prompts(config, tokenizer), "data.prompt_data")
    heldout = eval_prompts(config, tokenizer)
    if heldout is not None:
        _check_prompts(heldout, "eval.eval_prompt_data")
    if config.sft.sft_data is not None:
        _check_demonstrations(DemonstrationFile(config, tokenizer))
    return frozen


def _pinned(config: RunConfig, fresh: bool, hub: Hub) -> RunConfig:
    """The config with its names on the hub pinned, as they were when the run of that name began."""
    if not resolve.found(config):
        return config
    known = None if fresh else pins.read(config.run.root)
    url = given_servers().nats_url
    if known is None and not fresh and url is not None:
        known = asyncio.run(_pins_on_bus(url, config.run.name))
    return resolve.pinned(config, known, hub=hub)


async def _pins_on_bus(url: str, run: str) -> dict[str, str]:
    bus = await connect(url, run)
    try:
        return await pins.on_bus(bus, run)
    finally:
        await bus.close()


def _check_functions(config: RunConfig) -> None:
    """Refuses a function of the user's own that cannot be imported."""
    functions = hooks.paths(config)
    if not functions:
        return
    field, path = next(iter(functions.items()))
    command = [sys.executable, "-m", "shared.hooks"]
    try:
        importing = subprocess.run(command, input=config.model_dump_json(), capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired:
        raise ConfigError(field, path, f"importing {', '.join(functions.values())} did not end within {IMPORT_SECONDS:g} s") from None
    if importing.returncode == 2:
        raise ConfigError(*json.loads(importing.stdout.splitlines()[-1]))
    if importing.returncode != 0:
        words = " ".join(importing.stderr.split())[-LONGEST_LINE:]
        raise ConfigError(field, path, f"importing {', '.join(functions.values())} ended with {importing.returncode}: {words}")


def _check_prompts(prompts: TrainingPrompts | PromptFile, field: str) -> None:
    prompts.check()
    if (count := sum(prompts.left_out.values())) > 0:
        reasons = ", ".join(f"{number} {reason}" for reason, number in prompts.left_out.items() if number)
        first = " ".join(str(prompts.first_left_out).split())
        line = f"{field}: {count} of {count + len(prompts)} prompts are left out ({reasons}); the first: {first}"
        print(f"myxo: {line if len(line) <= LONGEST_LINE else line[:LONGEST_LINE] + ' …'}", file=sys.stderr)


def _check_demonstrations(demonstrations: DemonstrationFile) -> None:
    for row in range(len(demonstrations)):
        demonstrations.check(row)


@dataclass(frozen=True)
class GivenServers:
    """Servers named by the environment; None: not given, the launcher runs one of its own."""

    nats_url: str | None
    redis_url: str | None


def given_servers() -> GivenServers:
    """What ``NATS_URL`` and ``REDIS_URL`` say, or the files of ``NATS_URL_FILE`` and ``REDIS_URL_FILE``. Raises ConfigError."""
    return GivenServers(addresses.nats_url() or None, addresses.redis_url() or None)


async def check_servers(given: GivenServers, run: str) -> None:
    """Refuses a given URL that nobody answers."""
    if given.nats_url is not None:
        bus = await connect(given.nats_url, run)
        await bus.close()
    if given.redis_url is not None:
        await check_store(given.redis_url)


async def connect(url: str, run: str) -> Bus:
    """Connects to the NATS server that a person named, as the run's operator.

    Raises ConfigError for field NATS_URL, the value without credentials.
    """
    try:
        return await Bus.connect(url, name="myxo", deadline=ANSWER_SECONDS, inbox=Subjects(run).inbox("operator"))
    except BusUnreachable as error:
        expected = "give nats://[user:password@]host:port of a server with JetStream, or unset it for an embedded one"
        raise ConfigError("NATS_URL", redacted(url), f"{error}; {expected}") from error


async def check_store(url: str) -> None:
    """Refuses a Redis URL that nobody answers."""
    expected = "give redis://[user:password@]host:port or unix:///path/to/socket, or unset it for an embedded Valkey"
    try:
        store = Store(url)
    except ValueError as error:
        raise ConfigError("REDIS_URL", redacted(url), f"{error}; {expected}") from error
    try:
        await store.ping(deadline=ANSWER_SECONDS)
    except (StoreUnreachable, RedisError) as error:
        raise ConfigError("REDIS_URL", redacted(url), f"{error}; {expected}") from error
    finally:
        await store.close()
