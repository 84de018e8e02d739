"""The names on the Hugging Face hub that a config holds: pinned to the commits that the run began with."""

from __future__ import annotations

import asyncio

from myxo.preflight.server_checks import connect, given_servers
from shared.config.run_config import RunConfig
from shared.hub import hub_pins, hub_resolve
from shared.hub.hub_client import Hub


def pinned(config: RunConfig, hub: Hub, *, fresh: bool) -> RunConfig:
    """Returns the config with its names pinned as they were when the run of that name began, or, with ``fresh``, as they stand now.

    Raises ConfigError by field.
    """
    if not hub_resolve.found(config):
        return config
    known = None if fresh else hub_pins.read(config.run.root)
    url = given_servers().nats_url
    if known is None and not fresh and url is not None:
        known = asyncio.run(_pins_on_bus(url, config.run.name))
    return hub_resolve.pinned(config, known, hub=hub)


async def _pins_on_bus(url: str, run: str) -> dict[str, str]:
    bus = await connect(url, run)
    try:
        return await hub_pins.on_bus(bus, run)
    finally:
        await bus.close()
