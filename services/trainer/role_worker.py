"""What both roles of the trainer do alike, as every rank runs it: the model, orders, this rank's share of each batch, checkpoints."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import structlog

from services.trainer import batches, flops, partition, sample_stats, trainer_settings
from services.trainer.actor import Actor, StepResult, latest_step
from services.trainer.actor_critic_exchange import ActorCriticExchange, Role
from services.trainer.batches import TrainBatch
from services.trainer.commands import CommandBroadcast, Order
from services.trainer.control_client import ControlClient
from services.trainer.megatron import runtime
from services.trainer.objective import Moments
from services.trainer.partition import Partition
from services.trainer.sample_stats import SampleStats
from services.trainer.shard_reader import ShardReader
from services.trainer.step_scheduler import CriticStepScheduler, StepScheduler
from services.trainer.training_progress import Places, Progress
from shared.config.run_config import RunConfig
from shared.runtime.errors import MyxoError
from shared.schema.messages import Batch
from shared.store.payload_store import BlockingStore

SKIPPED_IN_A_ROW = 10
"""Optimizer steps without a finite gradient after which training has failed."""


class TrainingDiverged(MyxoError):
    """Loss or gradient stayed non-finite."""


class RoleWorker:
    """One rank of one role.

    Args:
        store: where payloads lie. link: rank 0's link to the bus; None on the other ranks. exchange: with the other role, where there is
            one.
    """

    def __init__(
        self, config: RunConfig, store: BlockingStore, link: ControlClient | None, role: Role, exchange: ActorCriticExchange | None
    ) -> None:
        self._config, self._link, self._role, self._log = config, link, role, structlog.get_logger()
        self._places = Places(config.run.root)
        self._objective = config.algorithm
        self._state("loading the model")
        trainer_settings.check_architecture(config, role)
        self._actor = Actor.create(trainer_settings.actor_config(config, role), trainer_settings.model_directory(config, role))
        self._channel = CommandBroadcast(config.trainer.collective_timeout)
        self._store, self._exchange = store, exchange
        self._reader = ShardReader(store, self._actor.data_parallel_rank)
        self._conductor: StepScheduler | CriticStepScheduler | None = None
        self._progress = Progress()
        self._costs: dict[int, float] = {}
        self._saving = self._published = 0  # steps of the checkpoint last begun, and of the newest that is known to be on disk
        self._skipped = 0

    def close(self) -> None:
        """Lets go of groups, files and connections."""
        self._reader.close()
        if self._exchange is not None:
            self._exchange.close()
        self._store.close()
        self._actor.close()

    # --- orders and batches

    def _order(self) -> Order:
        if self._conductor is None:
            return self._channel.receive()
        return self._channel.send(self._conductor.next(self._progress.steps, self._version))

    def _assembled(self, batch: Batch, ahead: Batch | None = None) -> TrainBatch:
        """This rank's share of a batch; that of the batch after it is read while this one trains."""
        with runtime.together(f"reading the samples of step {batch.step}"):
            share = self._reader.take(self._deal(batch))
            masks = batches.masks_of(share)
            rows = sample_stats.table(len(share.deal.items), share.samples, masks, share.deal.removed())
        if ahead is not None:
            self._reader.ahead(self._deal(ahead))
        known = SampleStats(runtime.sum_over_data_parallel(rows))
        with runtime.together(f"laying out step {batch.step}"):
            return batches.assemble(
                share,
                masks,
                known,
                self._objective,
                rank=self._actor.data_parallel_rank,
                max_tokens=self._max_tokens,
                vocab_size=self._actor.architecture.vocab_size,
            )

    def _deal(self, batch: Batch) -> Partition:
        parts = self._config.trainer.num_steps_per_rollout
        return partition.partition_batch(batch, parts, self._actor.data_parallel_size, self._max_tokens, self._cost)

    def _cost(self, tokens: int) -> float:
        """Operations of training a sample of so many tokens."""
        if tokens not in self._costs:
            self._costs[tokens] = flops.training(self._actor.architecture, [tokens], value_head=self._role == "critic")
        return self._costs[tokens]

    def _with_log_probs(self, batch: TrainBatch, field: str) -> TrainBatch:
        """The batch with the present weights' log-probs as one more field."""
        found = dict(zip(map(id, batch.micro_batches()), self._actor.log_probs(batch.micro_batches()), strict=True))
        return batches.with_field(batch, field, lambda one: found[id(one.packed)].cpu())

    def _merged(self, own: Moments) -> Moments:
        """The moments of all data-parallel ranks."""
        rows = np.zeros((self._actor.data_parallel_size, 3))
        rows[self._actor.data_parallel_rank] = own.count, own.mean, own.m2
        return Moments.merged(Moments(int(count), mean, m2) for count, mean, m2 in runtime.sum_over_data_parallel(rows).tolist())

    @property
    def _max_tokens(self) -> int:
        """Of a micro-batch: the ranks of a context-parallel group hold it together."""
        return self._config.trainer.max_tokens_per_gpu * self._actor.config.context_parallel_size

    def _watch_divergence(self, result: StepResult) -> None:
        if result.skipped is None:
            self._skipped = 0
            return
        self._skipped += 1
        self._log.warning("optimizer_step_skipped", step=self._progress.steps, reason=result.skipped, in_a_row=self._skipped)
        if self._skipped >= SKIPPED_IN_A_ROW:
            raise TrainingDiverged(f"{self._skipped} optimizer steps in a row were skipped, the last because {result.skipped}")

    # --- checkpoints

    @property
    def _checkpoints(self) -> Path:
        return self._places.checkpoints_of(self._role)

    def _resume(self) -> None:
        step = latest_step(self._checkpoints)
        if step is None:
            return
        self._state("loading the checkpoint")
        self._progress = Progress.from_extra(self._actor.load_checkpoint(self._checkpoints, step))
        self._saving = self._published = self._progress.steps
        self._log.info("resumed", steps=self._progress.steps, version=self._version)

    def _is_save_due(self) -> bool:
        steps = self._progress.steps
        return steps % self._config.trainer.save_interval == 0 or steps == self._config.rollout.num_rollout

    def _save(self) -> None:
        """Writes a checkpoint of where the training stands, in the background if so configured; the last one of a run at once."""
        started, steps, trainer = time.monotonic(), self._progress.steps, self._config.trainer
        wait = not trainer.async_save or steps == self._config.rollout.num_rollout
        self._actor.save_checkpoint(self._checkpoints, steps, self._progress.as_extra(), keep=trainer.keep_checkpoints, wait=wait)
        self._saving = steps
        self._log.info("checkpoint_saved" if wait else "checkpoint_begun", steps=steps, seconds=round(time.monotonic() - started, 2))

    def _save_before_leaving(self, done: bool) -> None:
        """Has everything on disk that a resume needs."""
        if not done and self._saving < self._progress.steps:
            self._save()
        self._actor.finish_save()

    def _saved(self) -> int:
        """Steps of the newest checkpoint that is on disk. Rank 0 publishes them, and is the one to ask."""
        if self._published < self._saving:
            self._published = max(latest_step(self._checkpoints) or 0, self._published)
        return self._published

    # --- small things

    @property
    def _version(self) -> int:
        return self._progress.version(self._config)

    @property
    def _first(self) -> bool:
        """Whether this is rank 0, which speaks for all."""
        return self._link is not None

    def _state(self, state: str) -> None:
        if self._link is not None:
            self._link.set_state(state)
