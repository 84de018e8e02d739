"""``myxo serve CONFIG``: training as an API for clients of the Tinker SDK, by servers, engines, a trainer and an endpoint here."""

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from myxo.commands.up import LAUNCHER, claimed, continuing, logged, with_flags
from myxo.display.progress_display import Display
from myxo.launch.launcher import TICK_SECONDS, Launch
from myxo.launch.supervisor import AT_WORK, StopReason, Supervisor
from myxo.preflight import Source, checked_config
from myxo.run.run_access import given_servers
from myxo.run.run_directory import RunDirectory
from shared.bus.connection import Bus
from shared.config.config_layers import Layers, over
from shared.view.live_services import newest_gauges

_SERVE = """Serve a model to clients of the Tinker SDK: they train adapters of it (or, without lora_rank, all of it) and sample from what
they trained, by a loop of their own.

Starts an embedded NATS server and Valkey (unless NATS_URL and REDIS_URL name others), engines, the trainer and the endpoint, and restarts
whatever dies: clients' commands are in a log, and their futures resolve. Ctrl-C stops everything in order; the same command continues."""

# What a config need not say where commands come from outside
DEFAULTS: dict[str, dict[str, Any]] = {
    "rollout": {"num_rollout": 0, "rollout_batch_size": 1, "rollout_max_response_len": 1},
    "tinker": {"tinker_endpoint": True},
}
LOOK_SECONDS = 1.0


class Serving(Launch):
    """A launch that serves until it is stopped."""

    async def _until_end(self, bus: Bus, supervisor: Supervisor, polling: asyncio.Task[None], shown: Display) -> StopReason | None:
        shown.close()
        look_at, reported = 0.0, ""
        while not self._signals:
            now = time.monotonic()
            self._tick_servers(bus, now)
            supervisor.note_ready(self._statuses)
            if now >= look_at:
                look_at = now + LOOK_SECONDS
                self._waits.see(self._situation(bus, supervisor.statuses(now), self._disk.text), time.time())
            done = self._progress.seen(0, newest_gauges(self._statuses, "trainer"))  # what dies without answers to clients is given up
            if (reason := supervisor.tick(now, done, hold=bool(self._disk.text))) is not None:
                return reason
            if polling.done():
                polling.result()
            at_work = [status for status in self._statuses if status.state in AT_WORK]
            url = next((status.engine for status in at_work if status.service == "gateway"), "")
            if url and {"gateway", "rollout", "trainer"} <= {status.service for status in at_work} and url != reported:
                reported = url
                self._say(f"Serving {self._config.tinker.tinker_model_name or self._config.model.hf_checkpoint}: TINKER_BASE_URL={url}")
            await asyncio.sleep(TICK_SECONDS)
        return None

    def _interrupted(self) -> int:
        first = self._signals[0]
        self._say(f"Stopped by {first.name}; `{self._again}` continues, with all that clients have trained.")
        return 128 + first


def declare(command: argparse.ArgumentParser) -> None:
    """Declares the arguments."""
    with_flags(command, _SERVE, "CONFIG [--fresh]", _run)
    command.add_argument("config", metavar="CONFIG", type=Path, help="a TOML file: run, model, trainer, rollout, tinker")
    command.add_argument("--fresh", action="store_true", help="remove what clients have done so far")


def _run(parsed: argparse.Namespace, console: Console) -> int:
    source = Source.of(parsed.config, parsed.flags)
    file = Layers()
    file.read(parsed.config)
    lost = [field for field in (f"rollout.{name}" for name in DEFAULTS["rollout"]) if field in file.origins]
    source.given.notes += [f"{field} changes nothing: clients say what is trained and sampled" for field in lost]
    source.given.overrides = over(DEFAULTS, source.given.overrides)
    config, given = checked_config(source, starts=True, fresh=parsed.fresh), given_servers()
    directory, again = RunDirectory(config.run.root), continuing(config, source, "serve")
    with claimed(config, directory, parsed.fresh, given), logged(config, directory, LAUNCHER):
        return asyncio.run(Serving(config, directory, given, console, fresh=parsed.fresh, again=again).run())
