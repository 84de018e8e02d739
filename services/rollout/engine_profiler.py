"""Has the engine trace a number of forward passes when the run has reached the steps that are to be profiled (SGLang's /start_profile)."""

import asyncio

from services.rollout.engine.engine_errors import EngineError
from services.rollout.replica import Replica
from shared.bus.connection import TRANSIENT
from shared.config import devices
from shared.runtime.errors import MyxoError
from shared.service.service_base import Service

DIRECTORY = "profile"
"""Where traces lie, in the run's directory; below it those of each replica."""

POLL_INTERVAL_S = 0.5
"""The interval at which the run's step is read."""

START_SECONDS = 60.0


class EngineProfiler:
    """Starts one trace of a replica's engine; the engine ends it by itself."""

    def __init__(self, service: Service, replica: Replica) -> None:
        self._service, self._replica, self._debug = service, replica, service.config.debug

    @property
    def wanted(self) -> bool:
        """Returns whether engines are to be traced."""
        return self._debug.use_pytorch_profiler and "rollout" in self._debug.profile_target

    async def run(self) -> None:
        """Waits for the first of the chosen steps, starts the trace, and returns; where they are over, it says so."""
        service, debug = self._service, self._debug
        while not self._replica.serving or (step := await self._step()) < debug.profile_step_start:
            await asyncio.sleep(POLL_INTERVAL_S)
        if step >= debug.profile_step_end:
            service.log.warning("engine_not_profiled", step=step, profile_step_end=debug.profile_step_end)
            return
        directory = (service.config.run.root / DIRECTORY / service.instance).absolute()
        client = self._replica.client
        assert client is not None  # of a replica that serves
        on_gpu = devices.resolve(service.config.rollout.rollout_device) == "cuda"
        request = {
            "output_dir": str(directory),
            "num_steps": debug.profile_engine_steps,
            "activities": ["CPU", *(["GPU"] if on_gpu else [])],
        }
        try:
            await client.transport.post("/start_profile", request, START_SECONDS, "nothing is traced")
            service.log.info("engine_profiled", step=step, directory=str(directory), forward_passes=debug.profile_engine_steps)
        except (EngineError, MyxoError) as error:
            service.log.error("engine_not_profiled", step=step, error=str(error))

    async def _step(self) -> int:
        """Returns how many steps the run has trained, as its buffer last said; -1 where none says."""
        try:
            alive = await self._service.registry.alive("buffer")
        except (MyxoError, *TRANSIENT):
            return -1
        return max((int(status.gauges.get("trained_steps", -1)) for status in alive), default=-1)
