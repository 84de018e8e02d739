"""``python -m services.trainer`` in a run that trains nothing (`debug_rollout_only`): takes each batch as a trainer would, dumps and
measures it, and lets its payloads go. It has no model and no GPU.

The weights are those that the engines have loaded from `hf_checkpoint`; version 0 is live as soon as a replica serves it, and stays.
"""

import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import structlog

from services.trainer import dumps
from services.trainer.batches import ShardReader, sample_limits
from services.trainer.commands import Leave
from services.trainer.control_client import ControlClient, StopAsked
from services.trainer.metrics_logger import MetricsLogger
from services.trainer.partition import Untrainable, partition_batch
from services.trainer.step_scheduler import BatchRequester
from shared.config.run_config import RunConfig
from shared.model.families import architecture_of
from shared.process.child_process import die_with_parent
from shared.runtime import exit_codes
from shared.runtime.safe_files import replace_file
from shared.schema.digests import TrainedSample, attest
from shared.schema.messages import Attestation, Batch, Trained
from shared.schema.weight_messages import WeightsLive
from shared.service.service_base import exit_code
from shared.store.payload_store import BlockingStore

VERSION = 0  # the only weight version of the run


class RolloutRecorder:
    """Records the batches of a run. ``progress``: the file with the number of those that are recorded."""

    def __init__(self, config: RunConfig, store: BlockingStore, control: ControlClient) -> None:
        self._config, self._store, self._control = config, store, control
        self._reader = ShardReader(store, 0, sample_limits(config, architecture_of(config).vocab_size))
        self._metrics = MetricsLogger(control, config, None)
        self._requests = BatchRequester(control, None, config.trainer.batch_timeout, config.eval.eval_timeout)
        self._progress: Path = config.trained / "checkpoints" / "recorded.json"
        self._serving: frozenset[str] = frozenset()
        self._log: Any = structlog.get_logger()

    def run(self) -> None:
        """Records batch after batch until the run is done or a stop is asked for. Raises DeadlineExceeded where none comes in time."""
        step = self._recorded()
        self._metrics.resume(step)
        self._control.set_state("ready")
        with contextlib.suppress(StopAsked):
            self._control.durable(step)  # an earlier life may have died before that
            while not self._control.stopping:
                serving = frozenset(status.instance for status in self._control.replicas if status.version == VERSION)
                if serving and serving != self._serving:
                    self._control.weights_live(WeightsLive(version=VERSION, replicas=sorted(serving), seconds=0.0, bytes=0, at=time.time()))
                    self._serving = serving
                answer = self._requests.next(step, VERSION)
                if isinstance(answer, Leave):
                    return
                if isinstance(answer, Batch) and self._record(answer):
                    step += 1

    def close(self) -> None:
        self._metrics.close()
        self._store.close()

    def _recorded(self) -> int:
        if not self._progress.is_file():
            return 0
        steps: int = json.loads(self._progress.read_text())["steps"]
        self._log.info("resumed", steps=steps)
        return steps

    def _record(self, batch: Batch) -> bool:
        started = time.time()
        if not batch.groups:  # all of them were refused
            self._finish(batch, started, attest([]))
            return True
        try:
            partition = partition_batch(batch, 1, 1, self._config.trainer.micro_batch_tokens, longest=self._config.longest_sample)
            shard = self._reader.take(partition)
        except Untrainable as error:
            self._log.warning("step_refused", step=error.step, error=str(error))
            self._control.refused(error)
            return False
        if (template := self._config.debug.rollout_dump) is not None:
            dumps.write_batch(template, batch, self._store)
        attestation = attest(
            TrainedSample(batch.groups[item.group].group, item.position, int(sample.mask.sum()), VERSION, sample.token_digest())
            for item, sample in ((partition.items[index], shard.samples[index]) for index in sorted(shard.samples))
        )
        self._metrics.recorded(partition, shard.stats, started, time.time())
        self._finish(batch, started, attestation)
        return True

    def _finish(self, batch: Batch, started: float, attestation: Attestation) -> None:
        """Has the buffer count the step and free its payloads; a step that is reported twice counts once."""
        steps = batch.step + 1
        self._control.trained(Trained(step=batch.step, version=VERSION, started=started, ended=time.time(), attestation=attestation))
        self._progress.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._progress, json.dumps({"steps": steps}).encode())
        self._control.durable(steps)


def main() -> None:
    """Runs the recorder of the run named by MYXO_RUN."""
    with ControlClient() as control:
        store = BlockingStore(control.service.redis_url, control.config.run.name)
        with contextlib.closing(RolloutRecorder(control.config, store, control)) as recorder:
            recorder.run()
    if control.stopping:
        sys.exit(exit_codes.STOPPED)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(exit_code("trainer", main))
