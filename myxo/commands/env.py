"""``myxo env check URL``: whether a live environment keeps the protocol, line by line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from myxo.preflight.server_checks import ANSWER_SECONDS
from shared.bus.connection import Bus, BusUnreachable, redacted
from shared.bus.subjects import RUN_ID, Subjects
from shared.environment import environment_url
from shared.environment.conformance import Check, Conformance, Example
from shared.environment.environment import Environment
from shared.environment.environment_client import open_environment
from shared.runtime import exit_codes, server_urls
from shared.runtime.errors import ConfigError

_STYLES = {"ok": "green", "warning": "yellow", "FAILED": "bold red"}


async def check(
    url: str,
    console: Console,
    *,
    run: str | None = None,
    given: tuple[str | None, str | None, list[str] | None] = (None, None, None),
    timeout: float | None = None,
    as_json: bool = False,
) -> int:
    """Prints what came of each check; returns the exit code.

    Args:
        run: whose subjects a ``nats:`` environment answers on. given: prompt, label and responses to ask with. timeout: seconds a score.

    Raises ConfigError for bad input.
    """
    example = _example(*given)
    results: list[Check] = []
    async with _opened(url, run) as environment:
        async for result in Conformance(environment, run or "", example, timeout).checks():
            results.append(result)
            if not as_json:
                console.print(_line(result), soft_wrap=True)
    failed = sum(result.result == "FAILED" for result in results)
    warned = sum(result.result == "warning" for result in results)
    if as_json:
        answer = {"url": environment.shown, "ok": not failed, "checks": [asdict(result) for result in results]}
        console.file.write(json.dumps(answer, indent=2) + "\n")
    else:
        verdict = "does not keep the protocol" if failed else "keeps the protocol"
        counts = f"checks: {len(results)}, failed: {failed}, warnings: {warned}"
        console.print(Text(f"{environment.shown} {verdict} ({counts})"), soft_wrap=True)
    return exit_codes.FAILED if failed else exit_codes.DONE


def _example(prompt: str | None, label: str | None, responses: list[str] | None) -> Example:
    default = Example()
    if prompt is None:
        return Example(default.prompt, label or default.label, responses or default.responses)
    return Example(prompt, label, responses or default.responses)


@contextlib.asynccontextmanager
async def _opened(url: str, run: str | None) -> AsyncIterator[Environment]:
    try:
        found = environment_url.parse(url)
    except ValueError as error:
        raise ConfigError("URL", url.rpartition("@")[2], str(error)) from None
    bus = await _bus(run) if found.responder else None
    try:
        environment = open_environment("under check", url, bus, run or "")
        try:
            yield environment
        finally:
            await environment.close()
    finally:
        if bus is not None:
            await bus.close()


async def _bus(run: str | None) -> Bus:
    if not run or not RUN_ID.match(run):
        raise ConfigError("--run", run, "required for nats:NAME: the run's id, lower-case letters, digits, '-' and '_'")
    url = server_urls.nats_url()
    if not url:
        raise ConfigError("NATS_URL", url, "required in the environment for nats:NAME: nats://[user:password@]host:port")
    try:
        return await Bus.connect(url, name="myxo", deadline=ANSWER_SECONDS, inbox=Subjects(run).inbox("operator"))
    except BusUnreachable as error:
        raise ConfigError("NATS_URL", redacted(url), f"{error}; give nats://[user:password@]host:port of the run's server") from error


def _line(result: Check) -> Text:
    return Text.assemble((f"{result.result:8}", _STYLES[result.result]), f"{result.name:32}", (result.detail, "dim"))
