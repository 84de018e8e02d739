"""The common part of the trainer's two roles on every rank: the model, commands, this rank's shard of each batch, checkpoints.

Where a pass over micro-batches fails, it is made for each sample alone, and all ranks agree on the samples that cannot be trained.

Training resumes after a stop or a death from the newest checkpoint that every rank holds, with its files as they were written
(`resume_step`). Ranks on other machines may have disks of their own. The buffer sends the batches after it again, which stay in the store
for that long.
"""

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, partial
from pathlib import Path

import structlog
from torch import Tensor

from services.trainer import batches, flops
from services.trainer.actor import Actor, StepResult
from services.trainer.actor_critic_exchange import ActorCriticExchange, Kind, Role
from services.trainer.backend import TrainerSettings, model_directory
from services.trainer.batches import BadBatch, MicroBatch, ShardReader, TrainBatch, sample_limits
from services.trainer.commands import Command, CommandBroadcast, Resume
from services.trainer.control_client import ControlClient, StopAsked
from services.trainer.loss_inputs import scored
from services.trainer.metrics_logger import MetricsLogger, TrainingSpeed
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.packing import BadSample, PackedBatch, separate
from services.trainer.parallel import runtime
from services.trainer.parallel.checkpoint import CheckpointDamaged, checkpoints, damage, set_aside
from services.trainer.parallel.loss_function import LossFunction, MicroBatchesFailed
from services.trainer.partition import Partition, RefusedSample, Untrainable, partition_batch
from services.trainer.step_scheduler import CriticStepScheduler, StepScheduler
from services.trainer.trainer_hooks import CONVERT, MegatronHooks, RolloutLog, converted
from shared.config.engine_limits import longest_trained
from shared.config.run_config import RunConfig
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import describe
from shared.schema.messages import Batch
from shared.schema.versions import crossed, version_after
from shared.store.payload_store import BlockingStore


@contextlib.contextmanager
def agreed(batch: Batch, what: str) -> Iterator[None]:
    """Has all ranks refuse a batch if the body does on one of them, so that none trains it. As `runtime.together` besides.

    Raises Untrainable with the samples that any rank has refused: BadSample, Untrainable, or BadBatch, which means all groups.
    """
    refused: list[RefusedSample] = []
    with runtime.together(what):
        try:
            yield
        except Untrainable as error:
            refused = error.samples
        except BadSample as error:
            group, _, position = error.sample.rpartition("/")
            refused = [RefusedSample(group, int(position), f"{error.field}: {error.problem}")]
        except BadBatch as error:
            refused = [RefusedSample(group.group, 0, str(error)) for group in batch.groups]
    with runtime.deadline(what):
        if runtime.anywhere(bool(refused)):
            everywhere = [RefusedSample(*item) for each in runtime.gather_json(list(map(astuple, refused))) for item in each]
            raise Untrainable(batch.step, first_of_groups(everywhere))


@contextlib.contextmanager
def attributed(partition: Partition, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
    """Names the samples for which a pass of the body over this rank's micro-batches fails.

    Raises Untrainable on all ranks; the pass's own error where it fails for each sample of the rank, since that is no sample's fault.
    """
    try:
        yield
    except MicroBatchesFailed as failed:
        step = partition.batch.step
        with agreed(partition.batch, f"the attribution of what failed in step {step}"):
            if failed.errors:
                found = []
                for index in failed.errors:
                    item = micro_batches[index]
                    for sample, alone in zip(item.indices, separate(item.packed), strict=False):  # a filler is of no sample
                        try:
                            failed.attempt(alone)
                        except Exception as error:
                            found.append(_refused(partition, sample, describe(error)))
                if len(found) in (0, sum(len(item.indices) for item in micro_batches)):
                    raise next(iter(failed.errors.values())) from None
                raise Untrainable(step, first_of_groups(found)) from failed
        raise


def refuse_infinite(partition: Partition, micro_batches: Sequence[MicroBatch], loss_of: Callable[[PackedBatch], float | None]) -> None:
    """Names the samples whose loss is not finite, after a step whose loss was not, on all ranks.

    Raises Untrainable, on all ranks. Where there is none, or no other, that is no sample's fault: it returns.

    Args:
        loss_of: the loss of one sample as a micro-batch of its own (`Actor.loss_alone`).
    """
    step, found, finite = partition.batch.step, [], 0
    for item in micro_batches:
        for sample, alone in zip(item.indices, separate(item.packed), strict=False):  # a filler is of no sample
            loss = loss_of(alone)
            if loss is not None and not math.isfinite(loss):
                found.append(_refused(partition, sample, f"its loss is {loss}"))
            finite += loss is not None and math.isfinite(loss)
    if runtime.anywhere(finite > 0) and runtime.anywhere(bool(found)):
        with agreed(partition.batch, f"the search for losses of step {step} that are not finite"):
            if found:
                raise Untrainable(step, first_of_groups(found))


def first_of_groups(samples: Sequence[RefusedSample]) -> list[RefusedSample]:
    """Returns the first sample of each group, in the groups' order."""
    return [sample for _, sample in sorted({sample.group: sample for sample in sorted(samples, reverse=True)}.items())]


def _refused(partition: Partition, sample: int, reason: str) -> RefusedSample:
    place = partition.items[sample]
    return RefusedSample(partition.batch.groups[place.group].group, place.position, reason)


SKIPPED_IN_A_ROW = 10  # optimizer steps without a finite gradient after which training has failed


class TrainingDiverged(MyxoError):
    """Loss or gradient stayed non-finite."""


class PartlyTrained(MyxoError):
    """A batch failed after some of its optimizer steps."""


@dataclass
class Progress:
    """The training's progress, as a checkpoint records it.

    Args:
        steps: finished training steps. sft_done: the warm start is over (or there is none).
    """

    steps: int = 0
    sft_done: bool = False


class RoleWorker:
    """One rank of one role.

    Args:
        store: holds the payloads. control: rank 0's connection to the bus; None on the other ranks. exchange: for the other role, if
            there is a critic.
    """

    def __init__(
        self, config: RunConfig, store: BlockingStore, control: ControlClient | None, role: Role, exchange: ActorCriticExchange | None
    ) -> None:
        self._config, self._control, self._log = config, control, structlog.get_logger()
        self._checkpoints = config.trained / ("checkpoints" if role == "actor" else "critic-checkpoints")
        self._objective, self._ranks = config.algorithm, config.trainer.ranks(role)
        self._set_state("loading the model")
        self._log_start("model_loading")
        self._custom = CustomFunctions.of(config)
        self._hooks = MegatronHooks(self._custom)
        settings = TrainerSettings.from_run(config, role)
        self._actor = Actor.create(settings, model_directory(config, role), initialized=self._hooks.initialized)
        self._log_start("model_loaded")
        reason = self._actor.backend.unshared
        if control is not None and config.trainer.prefix_sharing != "off" and reason is not None:
            self._log.info("prefix_sharing_off", reason=reason)
        self._broadcast = CommandBroadcast(config.trainer.collective_timeout)
        self._store, self._exchange = store, exchange
        limits = sample_limits(config, self._actor.architecture.vocab_size)
        self._limits = limits if role == "actor" else replace(limits, choices=None)
        self._reader = ShardReader(store, self._actor.data_parallel_rank, limits)
        self._scheduler: StepScheduler | CriticStepScheduler | None = None
        self._metrics: MetricsLogger | None = None
        if control is not None:
            log = RolloutLog(self._custom, store) if role == "actor" else None
            self._metrics = MetricsLogger(control, config, TrainingSpeed.of(self._actor), role, log)
        self._progress = Progress()
        self._begun_save = self._saved = 0  # steps of the checkpoint last begun, and of the newest that is known to be on disk
        self._room_made = -1  # steps at which a full store was last answered by a save; the same on every rank
        self._freed, self._room_needed, self._look = 0, False, True  # payloads below; the store is full; checkpoints are to be looked for
        self._save_began: float | None = None  # the checkpoint last begun; None: by an earlier life
        self._skipped = 0
        architecture = self._actor.counted_architecture
        self._operations = cache(lambda tokens: flops.training(architecture, [tokens], value_head=role == "critic"))
        self._max_tokens, self._longest = config.trainer.micro_batch_tokens, longest_trained(config)

    def close(self) -> None:
        """Closes groups, files and connections."""
        if self._metrics is not None:
            self._metrics.close()
        if self._exchange is not None:
            self._exchange.close()
        self._store.close()
        self._actor.close()

    def _log_start(self, event: str) -> None:
        if self._control is not None:
            self._log.info(event)

    # --- commands and batches

    def _report_activity(self, what: str) -> None:
        if self._control is not None:
            limit = self._config.trainer.collective_timeout
            many = self._ranks > 1
            after = f"if a rank hangs, the others end after trainer.collective_timeout = {limit:g} s, and all start again" if many else ""
            self._control.report_activity(what, (), after)

    def _next_command(self) -> Command:
        with self._actor.clock.part("idle"):
            if self._scheduler is None:
                return self._broadcast.receive()
            return self._broadcast.send(self._scheduler.next(self._progress.steps, self._version))

    def _assembled(self, batch: Batch, ahead: Batch | None = None) -> TrainBatch:
        """Returns this rank's part of a batch; that of the next batch is read while this one trains. Raises Untrainable on all ranks."""
        with agreed(batch, f"reading the samples of step {batch.step}"):
            shard = self._reader.take(partition := self._partition(batch))
        self._as_scored = shard.samples if CONVERT in self._custom else {}
        if CONVERT in self._custom:
            with runtime.together(f"the train data of step {batch.step}"):
                shard = converted(self._custom, partition, scored(partition, self._store, self._custom.args.reward_key)).applied(shard)
        if ahead is not None:
            with contextlib.suppress(Untrainable):  # it is refused when its turn comes
                self._reader.read_ahead(self._partition(ahead))
        stats = runtime.sum_over_data_parallel(shard.stats)
        with agreed(batch, f"laying out step {batch.step}"):
            return batches.assemble(shard, stats, self._objective, rank=self._actor.data_parallel_rank, limits=self._limits)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Reports to the buffer a batch that the body cannot train. The buffer hands the step out again, in the end with other groups."""
        try:
            yield
        except Untrainable as error:
            self._refuse(error)

    def _refuse(self, error: Untrainable) -> None:
        self._log.warning("step_refused", step=error.step, error=str(error))
        if self._control is not None:
            with contextlib.suppress(StopAsked):
                self._control.refused(error)

    def _partition(self, batch: Batch) -> Partition:
        optimizer_steps = self._config.trainer.num_steps_per_rollout
        ranks, whole_groups = self._actor.data_parallel_size, self._actor.model.least_saved is not None
        return partition_batch(batch, optimizer_steps, ranks, self._max_tokens, self._operations, self._longest, whole_groups=whole_groups)

    def _optimized(self, batch: TrainBatch, loss_of_step: Callable[[int], LossFunction], *, need_entropy: bool = False) -> list[StepResult]:
        if self._config.trainer.reset_optimizer_states:
            self._actor.optimizer.reset_moments()
        results: list[StepResult] = []
        for index, step in enumerate(batch.steps):
            packed = [micro_batch.packed for micro_batch in step]
            try:
                loss = loss_of_step(index)
                with attributed(batch.partition, step):
                    before = partial(self._hooks.before_step, self._actor, batch.step, index)
                    result = self._actor.train_step(packed, loss, need_entropy=need_entropy, before=before)
                if not math.isfinite(result.loss) and not results and self._actor.backend.independent:
                    refuse_infinite(batch.partition, step, partial(self._actor.loss_alone, loss_fn=loss, need_entropy=need_entropy))
                results.append(result)
            except Untrainable as error:
                if not results:
                    raise
                self._refuse(error)
                raise PartlyTrained(f"{error}; {index} of its optimizer steps were taken: all ranks go back to the checkpoint") from error
            self._watch_divergence(results[-1])
        return results

    def _computed(self, batch: TrainBatch, field: str, compute: Callable[[Sequence[PackedBatch]], list[Tensor]]) -> TrainBatch:
        with attributed(batch.partition, batch.micro_batches):
            return batch.with_computed(field, compute)

    def _watch_divergence(self, result: StepResult) -> None:
        if result.skipped is None:
            self._skipped = 0
            return
        self._skipped += 1
        self._log.warning("optimizer_step_skipped", step=self._progress.steps, reason=result.skipped, in_a_row=self._skipped)
        if self._skipped >= SKIPPED_IN_A_ROW:
            raise TrainingDiverged(f"{self._skipped} optimizer steps in a row were skipped, the last because {result.skipped}")

    # --- the other role

    def _give(self, kind: Kind, batch: TrainBatch) -> None:
        assert self._exchange is not None
        with runtime.together(f"writing the {kind} of step {batch.step}"):
            self._exchange.write(kind, batch.step, batch.named(kind))
        if self._control is not None:
            self._exchange.finish(kind, batch.step)

    def _with_received(self, kind: Kind, batch: TrainBatch) -> TrainBatch:
        assert self._exchange is not None
        with runtime.together(f"reading the {kind} of step {batch.step}"):
            return batch.with_values(kind, self._exchange.read(kind, batch.step, batch.names))

    # --- checkpoints

    def _resume(self) -> None:
        if (step := resume_step(self._checkpoints, self._broadcast, self._control, decides=self._scheduler is not None)) is not None:
            self._set_state("loading the checkpoint")
            self._progress = Progress(**self._actor.load_checkpoint(self._checkpoints, step))
            self._begun_save = self._saved = self._progress.steps
            self._log.info("resumed", steps=self._progress.steps, version=self._version)
        if self._metrics is not None:
            self._metrics.resume(self._progress.steps, sft_done=self._progress.sft_done)

    def _save_if_due(self) -> None:
        steps, rollout = self._progress.steps, self._config.rollout
        due = crossed(self._begun_save, steps, self._config.trainer.save_interval, rollout.num_rollout_per_epoch)
        if due or steps == rollout.num_rollout:
            self._save()

    def _save(self) -> None:
        started, steps, trainer = time.monotonic(), self._progress.steps, self._config.trainer
        self._report_activity(f"saving the checkpoint of {steps} steps")
        self._save_began, self._room_needed = time.time(), False
        wait = not trainer.async_save or steps == self._config.rollout.num_rollout
        with self._actor.clock.part("save"):
            self._actor.save_checkpoint(self._checkpoints, steps, asdict(self._progress), keep=trainer.keep_checkpoints, wait=wait)
        self._begun_save = steps
        self._log.info("checkpoint_saved" if wait else "checkpoint_begun", steps=steps, seconds=round(time.monotonic() - started, 2))

    def _save_at_once(self) -> None:
        """Returns once the present state is on disk, ahead of its interval, since the store is full: what is behind it is freed."""
        self._finish_saves()
        self._room_made, self._room_needed, self._look = self._progress.steps, True, True

    def _finish_saves(self, done: bool = False) -> None:
        """Returns once the present state is on disk; of a run that is ``done``, once what was begun is."""
        if not done and self._begun_save < self._progress.steps:
            self._save()
        self._actor.finish_save()

    def _kept_from(self) -> int:
        """Returns the step from which on payloads stay (`services.trainer.role_worker`). Only rank 0's counts: it publishes checkpoints."""
        if self._saved < self._begun_save or self._look:
            steps, trainer = checkpoints(self._checkpoints).keys(), self._config.trainer
            self._saved = max([self._saved, *steps])
            self._look = False
            needed = kept_from(steps, trainer.keep_checkpoints, self._config.rollout.num_rollout, room_needed=self._room_needed)
            self._freed = max(self._freed, needed)
        return self._freed

    # --- state

    @property
    def _version(self) -> int:
        return version_after(self._progress.steps, self._config.weights.update_weights_interval, self._config.rollout.num_rollout)

    def _set_state(self, state: str) -> None:
        if self._control is not None:
            self._control.set_state(state)


def resume_step(root: Path, broadcast: CommandBroadcast, control: ControlClient | None, *, decides: bool) -> int | None:
    """Returns the step to go back to, None to begin anew: rank 0 takes the newest that every rank has, and sends it to the others.

    Args:
        root: of the checkpoints. control: rank 0's connection to the bus. decides: this is rank 0.
    """
    held = _sound_steps(root, broadcast, control)
    if not decides:
        command = broadcast.receive()
        assert isinstance(command, Resume)  # the first command
        return command.step
    step = newest_of_all(held)
    if lacking := [rank for rank, steps in enumerate(held) if max(steps, default=None) != step]:
        newest = {rank: max(held[rank], default=None) for rank in lacking}
        reason = "ranks do not have the same steps on their disks"
        structlog.get_logger().warning("checkpoints_differ", resumes=step, ranks=newest, reason=reason)
    broadcast.send(Resume(step))
    return step


def _sound_steps(root: Path, broadcast: CommandBroadcast, control: ControlClient | None) -> list[list[int]]:
    """Returns the steps that each rank holds, once the newest that all hold has its files as they were written.

    One that has not is set aside on every disk. Raises CheckpointDamaged where that is the last one.
    """
    while True:
        held = broadcast.gather(sorted(found := checkpoints(root)))
        if (step := newest_of_all(held)) is None:
            return held
        reasons = broadcast.gather(damage(found[step], runtime.rank(), len(held)))
        if not any(reasons):
            return held
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        if newest_of_all([[other for other in steps if other != step] for steps in held]) is None:  # it stays: no start would see it
            raise CheckpointDamaged(f"step {step} in {root} is damaged (rank {rank}: {reason}), and no older one is left")
        if control is not None:
            control.set_state(f"passing over the damaged checkpoint of step {step}")
            detail = f"the checkpoint of step {step} is damaged (rank {rank}: {reason}); the next older one is tried"
            structlog.get_logger().error("checkpoint_damaged", step=step, rank=rank, reason=reason)
            control.publish_event("checkpoint_damaged", detail)
        with runtime.together(f"setting the damaged checkpoint of step {step} aside"):
            set_aside(found[step])


def newest_of_all(held: Sequence[Sequence[int]]) -> int | None:
    """Returns the newest step that everyone holds; None where there is none."""
    return max(set.intersection(*map(set, held)), default=None)


def kept_from(checkpoints: Collection[int], keep: int, last: int, *, room_needed: bool = False) -> int:
    """Returns the steps below which no checkpoint that is kept needs its batches: those of the oldest kept, so each can be resumed.

    Where the store is full, and at the run's end, they are the newest one's.

    Args:
        checkpoints: steps of those on disk. keep: how many of the newest stay. last: the run's steps. room_needed: the store is full.
    """
    newest = max(checkpoints, default=0)
    if room_needed or newest >= last:
        return newest
    return min(sorted(checkpoints)[-keep:], default=0)
