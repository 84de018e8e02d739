"""The training endpoint as a service: reads the log, serves the API, has samples made, each once."""

import asyncio
import itertools
import json
import time
from pathlib import Path

import numpy as np

from services.gateway.replicas import GenerationClient, ReplicaFailed, Replicas
from services.gateway.tinker.command_book import CommandBook
from services.gateway.tinker.requests import ServedModel, seed_of
from services.gateway.tinker.tenants import read_tenants
from services.gateway.tinker.tinker_api import TinkerApi
from shared.bus.command_log import CommandLog
from shared.config import devices
from shared.config.run_config import RunConfig
from shared.formats.request import TurnRefused
from shared.model.families import read_architecture
from shared.runtime import http_endpoints
from shared.runtime.addresses import HttpAddress
from shared.runtime.tasks import describe
from shared.runtime.telemetry import declare_metrics
from shared.schema import codec
from shared.schema.client_commands import Command, CommandOutcome, weights_directory
from shared.schema.messages import Sampling
from shared.service.service_base import Service
from shared.sessions.session import TurnGeneration, TurnRequest
from shared.sessions.session_store import SessionStore

declare_metrics("""
    commands_accepted_total | commands | of clients that the training endpoint has answered with a future
    commands_waiting | commands | of them without an outcome yet
    tinker_models | models | of clients that are there
""")
COUNT_SECONDS, STOP_SECONDS = 1.0, 2.0
RETRY_SECONDS = 0.5


def served_by(config: RunConfig) -> ServedModel:
    """Returns what a run serves. Raises ConfigError for a model that cannot be trained."""
    path = config.model.hf_checkpoint
    architecture, device = read_architecture(path), devices.resolve(config.rollout.rollout_device)
    names = (config.tinker.tinker_model_name or str(path), Path(path).name, str(path))
    seeded = device == "cpu" or bool(config.rollout.engine_flags.get("enable-deterministic-inference"))
    context = int(config.rollout.engine_flags.get("context-length") or architecture.max_positions)
    return ServedModel(names, config.trainer.lora_rank, architecture.vocab_size, context, seeded)


class Sampler:
    """Carries out sampling commands at the replicas."""

    def __init__(self, service: Service, log: CommandLog, book: CommandBook, replicas: Replicas, client: GenerationClient) -> None:
        self._service, self._log, self._book, self._replicas, self._client = service, log, book, replicas, client
        self._slots, self._next = asyncio.Semaphore(service.config.tinker.tinker_samples), itertools.count()
        self._running = dict[tuple[str, int], asyncio.Task[None]]()

    def start(self, command: Command) -> None:
        """Begins a command unless it is under way or done."""
        if command.key not in self._running and command.key not in self._book.outcomes:
            self._running[command.key] = task = self._service.spawn(self._carry_out(command))
            task.add_done_callback(lambda _: self._running.pop(command.key, None))

    async def _carry_out(self, command: Command) -> None:
        started, seconds = time.monotonic(), self._service.config.rollout.generate_timeout
        outcome = CommandOutcome(client=command.client, number=command.number, at=time.time(), error=command.refused, category="user")
        try:
            if not command.refused:
                result, figures = await self._sampled(command)
                outcome = await self._log.with_payload(outcome, result, self._service.store)
                outcome = outcome.model_copy(update={"category": "", "figures": {**figures, "seconds": time.monotonic() - started}})
        except TurnRefused as error:
            outcome = outcome.model_copy(update={"error": str(error)})
        except TimeoutError:
            outcome = outcome.model_copy(update={"error": f"no replica has sampled it within {seconds:g} s", "category": "server"})
        except Exception as error:  # the same command would end the endpoint again after its restart
            self._service.log.error("sample_failed", client=command.client, number=command.number, exc_info=error)
            outcome = outcome.model_copy(update={"error": describe(error), "category": "server"})
        self._book.see(await self._log.append(outcome.model_copy(update={"at": time.time()})))
        if command.payload is not None:
            await self._service.store.free(command.payload.keys)

    async def _sampled(self, command: Command) -> tuple[bytes, dict[str, float]]:
        self._book.check_sampler(command.client)
        arguments, path, config = json.loads(command.arguments), self._book.samplers[command.client], self._service.config
        assert command.payload is not None
        [blob] = await self._service.store.read(command.payload)
        prompt, sampling = np.array(codec.unpack(blob)["tokens"], np.int32), Sampling(**arguments["sampling"])
        room = (self._replicas.context or len(prompt) + sampling.max_new_tokens) - len(prompt)  # engines may have less than the model
        sampling = sampling.model_copy(update={"max_new_tokens": max(1, min(sampling.max_new_tokens, room))})
        asked = [
            TurnRequest(
                request=f"{command.client}/{command.number}/{index}",
                input_ids=prompt,
                sampling=sampling,
                seed=seed_of(arguments["seed"], command.client, command.number, index),
                seconds=config.rollout.generate_timeout,
                weights="" if path is None else str(weights_directory(config.trained, path)),
                scores_prompt=bool(arguments["prompt_log_probs"]) and index == 0,
            )
            for index in range(arguments["n"])
        ]
        found, last = await asyncio.gather(*map(self._generated, asked)), arguments["prompt_log_probs"]
        values = np.array(found[0].prompt_log_probs, np.float32)
        values[: len(values) - last] = np.nan
        sequences = [{"stopped": one.finish == "stop", "tokens": one.completion, "log_probs": one.log_probs} for one in found]
        result = {"sequences": sequences, "prompt": values if last else None, "cached": min(one.cached for one in found)}
        return codec.pack(result), {"tokens": float(sum(len(one.completion) for one in found)), "sequences": float(len(found))}

    async def _generated(self, request: TurnRequest) -> TurnGeneration:
        """Returns what a replica samples; another one is asked where it fails. Raises TurnRefused; TimeoutError."""
        async with self._slots, asyncio.timeout(request.seconds):
            while True:
                if known := self._replicas.known:
                    try:
                        found = await self._client.generate(known[next(self._next) % len(known)].url, request)
                        if found.finish != "abort":
                            return found
                    except ReplicaFailed as error:
                        self._service.log.warning("sample_failed", request=request.request, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)


async def serve(service: Service, address: HttpAddress) -> None:
    """Serves until asked to stop. Raises ConfigError for tenants that cannot be read, or an address that cannot be listened at."""
    config, sessions = service.config, SessionStore(service.store, service.run)
    tenants, served = read_tenants(config.tinker.tinker_tenants), await asyncio.to_thread(served_by, config)
    log, book, caught_up = CommandLog(service.bus, service.run), CommandBook(), asyncio.Event()
    replicas, client = Replicas(service.registry, sessions, config.tinker.tinker_samples), GenerationClient(sessions)
    sampler = Sampler(service, log, book, replicas, client)

    async def follow() -> None:
        async for entry in log.follow():
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
            api = TinkerApi(service, log, book, sampler.start, served, tenants)
            async with http_endpoints.serving(api.app(), address, grace_s=STOP_SECONDS) as listening:
                service.engine, service.state = f"http://{listening}", "ready"
                await service.announce()
                await service.stopping.wait()
    finally:
        await client.close()
