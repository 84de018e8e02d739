"""Carries out the endpoint's sampling commands at the replicas, each once; after a restart those without an outcome."""

import asyncio
import itertools
import json
import time
from pathlib import Path

import numpy as np

from services.gateway.replicas import GenerationClient, ReplicaFailed, Replicas
from services.gateway.tinker.command_book import CommandBook
from services.gateway.tinker.requests import PREFIX, seed_of
from services.gateway.wire.request import TurnRefused
from shared.bus.command_log import CommandLog
from shared.runtime.tasks import describe
from shared.schema import codec
from shared.schema.client_commands import Command, CommandOutcome
from shared.schema.digests import reference
from shared.schema.messages import Sampling
from shared.service.service_base import Service
from shared.sessions.session import TurnGeneration, TurnRequest

RETRY_SECONDS = 0.5
KEPT_SECONDS = 24 * 3600  # the time that a result is kept for its client


class Sampler:
    """Samples for commands.

    Args:
        most: sequences at once.
    """

    def __init__(
        self, service: Service, log: CommandLog, book: CommandBook, replicas: Replicas, client: GenerationClient, most: int
    ) -> None:
        self._service, self._log, self._book, self._replicas, self._client = service, log, book, replicas, client
        self._slots, self._running = asyncio.Semaphore(most), dict[tuple[str, int], asyncio.Task[None]]()
        self._turn = itertools.count()

    def start(self, command: Command) -> None:
        """Begins a command unless it is under way or done."""
        if command.key not in self._running and command.key not in self._book.outcomes:
            self._running[command.key] = task = self._service.spawn(self._carry_out(command))
            task.add_done_callback(lambda _: self._running.pop(command.key, None))

    async def _carry_out(self, command: Command) -> None:
        started, service = time.monotonic(), self._service
        outcome = CommandOutcome(client=command.client, number=command.number, at=time.time())
        try:
            if command.refused:
                raise TurnRefused(400, command.refused)
            result, figures = await self._sampled(command)
            key = service.subjects.command_key(command.client, command.number, "result")
            await service.store.write({key: result})
            await service.store.commands("the expiry of a result", [("EXPIRE", key, KEPT_SECONDS)])
            figures["seconds"] = time.monotonic() - started
            outcome = outcome.model_copy(update={"payload": reference(service.run, {key: result}), "figures": figures})
        except TurnRefused as error:
            outcome = outcome.model_copy(update={"error": str(error), "category": "user"})
        except TimeoutError:
            seconds = service.config.rollout.generate_timeout
            outcome = outcome.model_copy(update={"error": f"no replica has sampled it within {seconds:g} s", "category": "server"})
        except Exception as error:  # the same command would end the endpoint again after its restart
            service.log.error("sample_failed", client=command.client, number=command.number, exc_info=error)
            outcome = outcome.model_copy(update={"error": describe(error), "category": "server"})
        self._book.see(await self._log.append(outcome.model_copy(update={"at": time.time()})))

    async def _sampled(self, command: Command) -> tuple[bytes, dict[str, float]]:
        arguments, path = json.loads(command.arguments), self._book.samplers.get(command.client, "")
        assert command.payload is not None
        [blob] = await self._service.store.read(command.payload)
        prompt = np.array(codec.unpack(blob)["tokens"], np.int32)
        weights = "" if path is None else str(self.directory(path))
        seeds = [seed_of(arguments["seed"], command.client, command.number, index) for index in range(arguments["n"])]
        asked = [
            TurnRequest(
                request=f"{command.client}/{command.number}/{index}",
                input_ids=prompt,
                sampling=Sampling(**arguments["sampling"]),
                seed=seed,
                seconds=self._service.config.rollout.generate_timeout,
                weights=weights,
                scores_prompt=bool(arguments["prompt_log_probs"]) and index == 0,
            )
            for index, seed in enumerate(seeds)
        ]
        found = await asyncio.gather(*map(self._generated, asked))
        last = arguments["prompt_log_probs"]
        values = np.array(found[0].prompt_log_probs, np.float32)
        values[: len(values) - last] = np.nan
        sequences = [{"stopped": one.finish == "stop", "tokens": one.completion, "log_probs": one.log_probs} for one in found]
        cached, tokens = min(one.cached for one in found), sum(len(one.completion) for one in found)
        result = {"sequences": sequences, "prompt": values if last else None, "cached": cached}
        return codec.pack(result), {"tokens": float(tokens), "sequences": float(len(found))}

    def directory(self, path: str) -> Path:
        """Returns where weights for sampling lie."""
        client, kind, name = path.removeprefix(PREFIX).split("/")
        return self._service.config.trained / "clients" / kind / client / name

    async def _generated(self, request: TurnRequest) -> TurnGeneration:
        """Returns what a replica samples; another one is asked where it fails. Raises TurnRefused; TimeoutError."""
        async with self._slots, asyncio.timeout(request.seconds):
            while True:
                known = self._replicas.known
                if known:
                    target = known[next(self._turn) % len(known)]
                    try:
                        found = await self._client.generate(target.url, request)
                        if found.finish != "abort":
                            return found
                    except ReplicaFailed as error:
                        self._service.log.warning("sample_failed", request=request.request, error=str(error))
                await asyncio.sleep(RETRY_SECONDS)
