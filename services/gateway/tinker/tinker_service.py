"""The training endpoint as a service: reads the log, serves the API, has samples made."""

import asyncio
from pathlib import Path

from services.gateway.replicas import GenerationClient, Replicas
from services.gateway.tinker.command_book import CommandBook
from services.gateway.tinker.requests import ServedModel
from services.gateway.tinker.sampler import Sampler
from services.gateway.tinker.tenants import read_tenants
from services.gateway.tinker.tinker_api import TinkerApi
from shared.bus.command_log import CommandLog
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.model.families import read_architecture
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from shared.runtime.telemetry import declare_metrics
from shared.service.service_base import Service
from shared.sessions.session_store import SessionStore

declare_metrics("""
    commands_accepted_total | commands | of clients that the training endpoint has answered with a future
    commands_waiting | commands | of them without an outcome yet
    tinker_models | models | of clients that are there
""")
COUNT_SECONDS, STOP_SECONDS = 1.0, 2.0


def served_by(config: RunConfig) -> ServedModel:
    """Returns what a run serves. Raises ConfigError for a model that cannot be trained."""
    path = config.model.hf_checkpoint
    architecture, device = read_architecture(path), devices.resolve(config.rollout.rollout_device)
    names = (config.tinker.tinker_model_name or str(path), Path(path).name, str(path))
    seeded = device == "cpu" or bool(config.rollout.engine_flags.get("enable-deterministic-inference"))
    context = int(config.rollout.engine_flags.get("context-length") or architecture.max_positions)
    return ServedModel(names, config.trainer.lora_rank, architecture.vocab_size, context, seeded)


async def serve(service: Service, address: HttpAddress) -> None:
    """Serves until asked to stop. Raises ConfigError for tenants that cannot be read, or an address that cannot be listened at."""
    config = service.config
    tenants, served = read_tenants(config.tinker.tinker_tenants), await asyncio.to_thread(served_by, config)
    log, book = CommandLog(service.bus, service.run), CommandBook()
    sessions = SessionStore(service.store, service.run)
    replicas, client = Replicas(service.registry, sessions, config.tinker.tinker_samples), GenerationClient(sessions)
    sampler, caught_up = Sampler(service, log, book, replicas, client, config.tinker.tinker_samples), asyncio.Event()

    async def follow() -> None:
        async for _, entry in log.follow():
            if entry is not None:
                book.see(entry)
            elif not caught_up.is_set():
                for command in [one for one in book.commands.values() if one.verb == "sample" and one.key not in book.outcomes]:
                    sampler.start(command)
                caught_up.set()

    async def count() -> None:
        while True:
            service.metrics.set("commands_waiting", len(book.commands) - len(book.outcomes))
            service.metrics.set("tinker_models", len(book.models))
            await asyncio.sleep(COUNT_SECONDS)

    try:
        async with service.background(follow(), count(), replicas.keep()):
            await caught_up.wait()
            api = TinkerApi(service, log, book, sampler, served, tenants)
            async with http_endpoints.serving(api.app(), address, grace_s=STOP_SECONDS) as listening:
                service.engine, service.state = f"http://{listening}", "ready"
                await service.announce()
                await service.stopping.wait()
    finally:
        await client.close()
