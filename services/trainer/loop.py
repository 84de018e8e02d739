"""The actor's training loop, as every rank runs it.

After the warm start each round takes a command: push the weights, or train a batch, report it and save when due. The loss is defined in
`services.trainer.objective`; the buffer chooses the batches, and `services.trainer.step_scheduler` the commands.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial

import numpy as np
from torch import Tensor

from services.trainer import dumps
from services.trainer.actor import Actor, PolicyExporter, StepResult
from services.trainer.actor_critic_exchange import ActorCriticExchange
from services.trainer.batch_metrics import token_means
from services.trainer.batches import TrainBatch, attestation_of, demonstration_micro_batches
from services.trainer.colocation import ColocationScheduler
from services.trainer.commands import Leave, Lend, Push, Snapshot, Train, Wait
from services.trainer.control_client import ControlClient, StopAsked, checkpoint_span, step_spans
from services.trainer.flops import Work
from services.trainer.loss_inputs import LossInputs, old_log_probs
from services.trainer.objective.advantage import needs
from services.trainer.objective.loss import SftLoss
from services.trainer.objective.policy_gradient import REWARD_KL, kl_estimate
from services.trainer.packing import PackedBatch
from services.trainer.parallel import runtime
from services.trainer.reference_policy import FrozenWeights, ReferencePolicy
from services.trainer.role_worker import RoleWorker
from services.trainer.step_profiler import StepProfiler
from services.trainer.step_scheduler import StepScheduler
from services.trainer.trainer_hooks import POSTPROCESS, postprocessed
from services.trainer.weights.pusher import Pusher
from services.trainer.weights.snapshot_writer import SnapshotWriter
from services.trainer.weights.stage_sender import ChannelKind
from shared.config import devices
from shared.config.algorithm import AlgorithmSection
from shared.config.run_config import RunConfig
from shared.data.demonstrations import DemonstrationFile
from shared.data.rows import MixedOrder
from shared.data.tokenizer import Tokenizer
from shared.model.final_exports import exported_steps, hf_directory, mark_of, retire_exports
from shared.schema.digests import attest
from shared.schema.messages import Attestation, Batch, Trained
from shared.schema.sample import SampleLimits
from shared.store.payload_store import BlockingStore


class Trainer(RoleWorker):
    """One rank of the actor.

    Args:
        store, control, exchange: as `RoleWorker` takes them.
    """

    def __init__(
        self, config: RunConfig, store: BlockingStore, control: ControlClient | None, exchange: ActorCriticExchange | None = None
    ) -> None:
        lent = devices.lent_instances(config)
        lending = devices.as_lent(config) if lent else config
        self._colocation = ColocationScheduler(lending, control, lent)
        self._colocation.begin()
        super().__init__(config, store, control, "actor", exchange)
        self._colocation.attach(self._actor)
        self._loss_inputs = LossInputs(self._objective, self._custom, store)
        self._teacher: FrozenWeights | None = None
        self._recorded: list[dict[int, Tensor]] = []
        self._reference: ReferencePolicy | None = None
        if needs(self._objective).reference:
            first, interval = config.trained / "reference", config.algorithm.ref_update_interval
            self._reference = ReferencePolicy(self._actor, first, interval, config.trained / "checkpoints", config.model.own_reference)
        self._durable = 0
        kind: ChannelKind = "memory" if config.trainer.colocate else "group"
        model, quantization = self._actor.model, self._actor.quantization
        self._pusher = Pusher(control, model, config.weights, kind, quantization, lambda replica: replica not in lent)
        self._lent = Pusher(control, model, lending.weights, "memory", quantization, lent.__contains__) if lent else None
        self._exporter = PolicyExporter(config, control, self._actor)
        self._profiler = StepProfiler(config, runtime.rank())
        self._snapshots = SnapshotWriter(config, control, self._actor)
        if control is not None:
            control.watch_activity(self._pusher.doing)
            self._scheduler = StepScheduler(control, config, self._pusher, self._snapshots, self._colocation, exchange, self._lent)

    def run(self) -> None:
        """Trains until the run is done or a stop is asked for; all that a resume needs is then on disk."""
        self._resume()
        self._exporter.begin(self._progress.steps)
        self._save_final_hf()
        self._report_durable()
        if not self._progress.sft_done:
            self._warm_start()
        if self._reference is not None:
            self._set_state("loading the reference")
            self._reference.load(self._progress.steps)
        if self._config.algorithm.opd_teacher_load is not None:
            self._set_state("loading the teacher")
            self._teacher = FrozenWeights.from_hf(self._actor.model, self._config.algorithm.opd_teacher_load)
        self._set_state("ready")
        while True:
            match self._next_command():
                case Push() as push:
                    self._push(push)
                case Lend(push=lent):
                    self._lend(lent)
                case Snapshot(version=version):
                    self._report_activity(f"writing the weights of version {version} to disk")
                    self._snapshots.write(version)
                case Train(batch=batch, ahead=ahead):
                    self._report_activity(f"training step {batch.step}")
                    self._colocation.onload()
                    version = self._version
                    self._profiler.begin(batch.step)
                    with self._refusing():
                        self._train(batch, ahead)
                        self._save_if_due()
                    self._profiler.end()
                    if self._control is not None:
                        self._control.report_activity(f"the batch of step {self._progress.steps}", ["buffer"])
                    if self._version == version:  # no push follows that would give the GPUs to the engines
                        self._colocation.offload()
                case Wait(save=save):
                    if save and self._room_made < self._progress.steps:
                        self._save_at_once()
                    self._colocation.offload()
                case Leave(done=done):
                    return self._leave(done)
            self._report_pushes()
            self._report_durable()

    def close(self) -> None:
        self._profiler.close()
        self._colocation.end()
        self._pusher.close()
        if self._lent is not None:
            self._lent.close()
        super().close()

    # --- one step

    def _train(self, batch: Batch, ahead: Batch | None) -> None:
        started = time.time()
        if not batch.groups:  # all of them were refused
            return self._finished(batch, started, time.time(), attest([]))
        with self._actor.clock.part("prepare"):
            prepared = self._prepared(batch, ahead)
            if self._control is not None and (template := self._config.debug.rollout_dump) is not None:
                dumps.write_batch(template, batch, self._store)
            attestation = attestation_of(prepared, runtime.sum_over_data_parallel, self._as_scored)
            if POSTPROCESS in self._custom:
                with runtime.together(f"the data of step {batch.step}, postprocessed"):
                    prepared = postprocessed(self._custom, prepared)
            means = token_means(prepared.packed, runtime.sum_over_data_parallel)
            shared = Work(*runtime.sum_over_data_parallel(np.array(self._actor.shared_work(prepared.packed))).tolist())
        optimizing, results = time.monotonic(), []
        if batch.step >= self._config.algorithm.num_critic_only_steps:
            loss = partial(self._loss_inputs.loss, prepared, self._config.weights.update_weights_interval)
            with self._profiler.part("train_actor"), self._actor.clock.part("gradient"):
                results = self._optimized(prepared, loss, need_entropy=self._objective.entropy_coef != 0.0)
        optimized, ended, parts = time.monotonic() - optimizing, time.time(), self._actor.clock.ended()
        self._inspect(prepared, results)
        if self._metrics is not None:
            self._metrics.step(prepared, results, started, ended, optimized=optimized, parts=parts, token_means=means, shared=shared)
        self._finished(batch, started, ended, attestation)

    def _finished(self, batch: Batch, started: float, ended: float, attestation: Attestation) -> None:
        self._progress.steps = batch.step + 1
        if self._reference is not None:
            self._reference.renew(self._progress.steps)
        if self._control is not None:
            report = Trained(step=batch.step, version=batch.version, started=started, ended=ended, attestation=attestation)
            self._control.trained(report)
            if self._control.traces.on:
                for span in step_spans(batch, started, ended):
                    self._control.traces.add(span)

    def _prepared(self, batch: Batch, ahead: Batch | None) -> TrainBatch:
        """Returns the batch with every field that its loss reads: log-probs of present and frozen policies, KL, values, advantages."""
        prepared = self._assembled(batch, ahead)
        wanted = needs(self._objective, len(prepared.steps))
        if wanted.proximal:  # with a single step the policy itself is the proximal one
            prepared = self._computed(prepared, "proximal_log_probs", self._log_probs(""))
        elif self._config.debug.train_dump is not None:  # for whoever compares them with the engine's; nothing reads this field
            prepared = self._computed(prepared, "trainer_log_probs", self._log_probs(""))
        if self._recorded:
            prepared, self._recorded = prepared.with_routing(self._recorded), []
        if self._reference is not None:
            with self._reference.in_place_of_the_policy():
                prepared = self._computed(prepared, "ref_log_probs", self._log_probs("ref_"))
        if self._teacher is not None:
            with self._teacher.in_place_of(self._actor.model):
                prepared = self._computed(prepared, "teacher_log_probs", self._log_probs("teacher_"))
        if wanted.kl:
            prepared = prepared.with_field("kl", self._reward_kl)
            if self._exchange is not None:  # the critic's returns contain the penalty too
                self._give("kl", prepared)
        if wanted.values:
            prepared = self._with_received("values", prepared)
        return self._loss_inputs.with_advantages(prepared)

    def _log_probs(self, prefix: str) -> Callable[[Sequence[PackedBatch]], list[Tensor]]:
        """Returns the computation of log-probs under the weights that are in place. ``prefix``: slime's, of what is computed."""

        def compute(batches: Sequence[PackedBatch]) -> list[Tensor]:
            self._hooks.before_log_probs(self._actor, prefix)
            part = prefix and f"_{prefix.rstrip('_')}"
            with self._profiler.part("train_log_probs", part), self._actor.clock.part("log_probs"):
                if prefix:  # of another model, whose routers have their own choice
                    return self._actor.log_probs([replace(batch, experts=None, routing=None) for batch in batches])
                if not self._config.trainer.use_routing_replay:
                    return self._actor.log_probs(batches)
                found, self._recorded = self._actor.log_probs_and_routing(batches)
                return found

        return compute

    def _reward_kl(self, batch: PackedBatch) -> Tensor:
        """Returns the KL penalty in the rewards of a micro-batch's tokens: [T]."""
        old, reference = batch.fields[old_log_probs(self._objective)], batch.fields["ref_log_probs"]
        return kl_estimate(old, reference, self._objective.kl_loss_type or REWARD_KL) * batch.loss_mask

    def _inspect(self, batch: TrainBatch, results: list[StepResult]) -> None:
        if (template := self._config.debug.train_dump) is not None:
            dumps.write_tensors(template, batch, results, runtime.rank())
        tokens = sum(result.metrics.get("agreement_tokens", 0.0) for result in results)
        difference = sum(result.metrics.get("agreement_abs_diff", 0.0) for result in results) / max(tokens, 1.0)
        if self._control is not None and difference > self._config.monitoring.logprob_alarm:
            self._log.warning("logprobs_differ", step=batch.step, mean_abs_diff=difference, tokens=int(tokens))
            one = batch.partition.name(0) if batch.partition.items else "GROUP/INDEX"
            detail = f"engine and trainer differ by {difference:.3g} on {int(tokens)} tokens of step {batch.step}"
            detail += f"; {self._config.bisect_command(one)} finds where"
            self._control.publish_event("logprobs_differ", detail)

    # --- before the first step

    def _warm_start(self) -> None:
        if self._config.sft.sft_data is not None:
            self._set_state("warm start")
            for index, result in enumerate(train_demonstrations(self._actor, self._config, self._objective, self._max_tokens)):
                self._watch_divergence(result)
                if self._metrics is not None:
                    self._metrics.sft(index + 1, self._config.sft.sft_steps, result)
        if self._reference is not None:
            self._reference.save_first()
        self._progress.sft_done = True
        if self._config.saves_at_start:
            self._save()

    # --- pushes and checkpoints

    def _push(self, push: Push) -> None:
        colocated = self._config.trainer.colocate
        with self._actor.clock.part("push"), self._colocation.pushing() if colocated else contextlib.nullcontext():
            self._pusher.begin(push)
            if colocated:
                self._pusher.wait()

    def _lend(self, push: Push | None) -> None:
        assert self._lent is not None  # nothing else is lent
        with self._actor.clock.part("push"), self._colocation.pushing():
            if push is not None:
                self._lent.begin(push)
                self._lent.wait()
        for result in self._lent.results():
            self._log.info("lent_weights_pushed", **asdict(result))

    def _leave(self, done: bool) -> None:
        self._report_activity("leaving")
        self._pusher.wait()
        self._report_pushes()
        self._finish_saves(done)
        self._exporter.finish()

    def _report_pushes(self) -> None:
        for result in self._pusher.results():
            self._log.info("weights_pushed", **asdict(result))
            if self._metrics is not None:
                self._metrics.push(result)

    def _save(self) -> None:
        self._colocation.onload()
        if self._control is not None:
            retire_exports(self._config, self._progress.steps)
        super()._save()
        self._save_final_hf(anew=True)

    def _save_final_hf(self, anew: bool = False) -> None:
        """Writes the final weights where they are due and, unless ``anew``, lacking; the run's end is reported after it. A collective."""
        path, steps = hf_directory(self._config), self._progress.steps
        due = self._progress.sft_done and self._config.trainer.save_final_hf and steps == self._config.rollout.num_rollout
        if due and (anew or runtime.gather_json(exported_steps(self._config, path))[0] != steps):
            self._report_activity(f"writing the final weights to {path}")
            self._actor.save_hf(path, mark_of(self._config, steps))
            self._log_start("final_weights_written")

    def _save_if_due(self) -> None:
        super()._save_if_due()
        if self._begun_save == self._progress.steps:
            self._exporter.begin(self._progress.steps, anew=True)

    def _report_durable(self) -> None:
        """Reports to the buffer the steps that all kept checkpoints (with a critic, of both roles) hold: their payloads may be deleted."""
        control = self._control
        if control is None or control.stopping:  # a resume reports what a stop has not
            return
        steps = self._kept_from()
        if self._saved >= self._begun_save and self._save_began is not None:
            if self._begun_save:  # that of a warm start belongs to no step's trace
                control.traces.add(checkpoint_span(self._begun_save, self._save_began, time.time()))
            self._save_began = None
        if steps <= self._durable:
            return
        if self._exchange is not None:
            self._exchange.save("actor", steps)
            self._exchange.forget("values", steps)
            steps = min(steps, self._exchange.saved("critic"))
        if steps > self._durable:
            with contextlib.suppress(StopAsked):
                control.durable(steps)
                self._durable = steps


def train_demonstrations(actor: Actor, config: RunConfig, objective: AlgorithmSection, max_tokens: int) -> Iterator[StepResult]:
    """Trains the run's demonstrations (the supervised warm start) and yields each step's result; resets the optimizer after the last.

    Each epoch has an order of its own, which the seed alone gives. ``max_tokens``: of a micro-batch.
    """
    sft, file = config.sft, DemonstrationFile(config, Tokenizer(config.model.hf_checkpoint))
    order = MixedOrder([len(file)], [1.0], shuffle=True, seed=config.trainer.seed)
    actor.reset_optimizer(sft.schedule)
    alone = config.longest_sample > max_tokens
    rank, ranks = actor.data_parallel_rank, actor.data_parallel_size
    for first in range(0, sft.sft_steps * sft.sft_batch_size, sft.sft_batch_size):
        samples = [sample for index in range(first, first + sft.sft_batch_size) for sample in file.samples(order.row(index))]
        for sample in samples:
            sample.check(SampleLimits(vocabulary=actor.architecture.vocab_size))
        micro_batches = demonstration_micro_batches(samples, objective, dp_rank=rank, dp_size=ranks, max_tokens=max_tokens, alone=alone)
        yield actor.train_step(micro_batches, SftLoss(), temperature=1.0)
    actor.reset_optimizer()
