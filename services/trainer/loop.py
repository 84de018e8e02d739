"""The actor's training loop, as every rank runs it.

Warm start, then: take an order; push the weights, or train a batch, report it, save now and then. What a step means is in
`services.trainer.objective`; which batch comes next is the buffer's; what to do next is `services.trainer.step_scheduler`'s.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, replace

from services.trainer import batches, dumps
from services.trainer.actor import StepResult
from services.trainer.actor_critic_exchange import ActorCriticExchange
from services.trainer.batch_metrics import TokenSums
from services.trainer.batches import TrainBatch
from services.trainer.colocation import ColocationScheduler
from services.trainer.commands import Leave, Push, Snapshot, Train, Wait
from services.trainer.control_client import ControlClient, StopAsked
from services.trainer.loss_inputs import LossInputs, teacher_gap
from services.trainer.megatron import runtime
from services.trainer.megatron.frozen_weights import FrozenWeights
from services.trainer.megatron.runtime import together
from services.trainer.metrics_logger import MetricsLogger
from services.trainer.objective import SftLoss, needs
from services.trainer.objective.kl import kl_estimate
from services.trainer.reference_policy import ReferencePolicy
from services.trainer.role_worker import RoleWorker
from services.trainer.step_scheduler import StepScheduler
from services.trainer.warm_start import Demonstrations
from services.trainer.weights.pusher import Pusher
from services.trainer.weights.snapshot_writer import SnapshotWriter
from shared.config.run_config import RunConfig
from shared.data.tokenizer import Tokenizer
from shared.schema.messages import Batch, Trained
from shared.store.payload_store import BlockingStore

TOKEN_MEANS = {
    "advantages": "advantages",
    "log_probs": "proximal_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "ref_log_probs": "ref_log_probs",
    "kl": "kl",
    "values": "values",
    "returns": "returns",
}
"""Metrics of a batch → the field that they are the mean of over trained tokens, where the batch has it."""


class Trainer(RoleWorker):
    """One rank of the actor.

    Args:
        store, link, exchange: as `RoleWorker` takes them.
    """

    def __init__(
        self, config: RunConfig, store: BlockingStore, link: ControlClient | None, exchange: ActorCriticExchange | None = None
    ) -> None:
        self._turns = ColocationScheduler(config, link)
        self._turns.begin()
        super().__init__(config, store, link, "actor", exchange)
        self._turns.attach(self._actor)
        self._shaping = LossInputs(config, self._objective, self._store)
        self._teacher: FrozenWeights | None = None
        trainer, interval = config.trainer, config.algorithm.ref_update_interval
        self._reference: ReferencePolicy | None = None
        if needs(self._objective).reference:
            keep = trainer.keep_checkpoints * trainer.save_interval
            self._reference = ReferencePolicy(self._actor, self._places.reference, interval, keep)
        self._durable = 0
        self._record: MetricsLogger | None = None
        self._pusher = Pusher(link, self._actor.model, config.weights, "memory" if config.trainer.colocate else "group")
        self._snapshots = SnapshotWriter(config, link, self._actor)
        if link is not None:
            self._record = MetricsLogger(link, self._places.tensorboard, config, self._actor)
            self._conductor = StepScheduler(
                link,
                self._pusher,
                self._snapshots,
                config.trainer.batch_timeout,
                steps=config.rollout.num_rollout,
                interval=config.weights.update_weights_interval,
                exchange=self._exchange,
                turns=self._turns,
            )

    def run(self) -> None:
        """Trains until the run is done or a stop is asked for; everything it needs to go on is then on disk."""
        self._resume()
        self._tell_durable()
        if not self._progress.sft_done:
            self._warm_start()
        if self._reference is not None:
            self._state("loading the reference")
            self._reference.load(self._progress.steps)
        if self._config.algorithm.opd_teacher_load is not None:
            self._state("loading the teacher")
            self._teacher = FrozenWeights.from_hf(self._actor.model, self._config.algorithm.opd_teacher_load)
        self._state("ready")
        while True:
            match self._order():
                case Push() as push:
                    with self._turns.pushing():
                        self._pusher.begin(push)
                        if self._turns.colocated:
                            self._pusher.wait()
                case Snapshot(version=version):
                    self._snapshots.write(version)
                case Train(batch=batch, ahead=ahead):
                    self._turns.take()
                    version = self._version
                    self._train(batch, ahead)
                    if self._is_save_due():
                        self._save()
                    if self._version == version:  # no push follows, with which the turn would end
                        self._turns.give()
                case Leave(done=done):
                    self._pusher.wait()
                    self._tell_pushes()
                    if not done and self._saving < self._progress.steps:
                        self._turns.take()
                    self._save_before_leaving(done)
                    break
                case Wait():
                    self._turns.give()
            self._tell_pushes()
            self._tell_durable()

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
        self._turns.end()
        self._pusher.close()
        super().close()

    # --- one order at a time

    def _tell_pushes(self) -> None:
        """Writes down the pushes that have ended. Raises what broke one among the trainer's ranks."""
        for result in self._pusher.results():
            self._log.info("weights_pushed", **asdict(result))
            if self._record is not None:
                self._record.push(result)

    def _train(self, batch: Batch, ahead: Batch | None) -> None:
        started = time.time()
        if self._first and (template := self._config.monitoring.save_debug_rollout_data) is not None:
            dumps.write_batch(template, batch, self._store)
        prepared = self._prepared(batch, ahead)
        token_means = self._token_means(prepared)
        optimizing = time.monotonic()
        results = self._optimized(prepared)
        optimized, ended = time.monotonic() - optimizing, time.time()
        self._inspect(prepared, results)
        self._progress.steps = batch.step + 1
        if self._reference is not None:
            self._reference.renew(self._progress.steps)
        if self._record is not None and results:
            self._record.step(prepared, results, started, ended, optimized=optimized, token_means=token_means)
        if self._link is not None:
            self._link.trained(Trained(step=batch.step, version=batch.version, started=started, ended=ended))

    def _prepared(self, batch: Batch, ahead: Batch | None) -> TrainBatch:
        """The batch with everything that its loss reads: log-probs of the present and the reference policy, values, advantages."""
        objective, prepared = self._objective, self._assembled(batch, ahead)
        wanted = needs(objective, len(prepared.steps))
        if wanted.proximal:  # with a single step the policy itself is the proximal one
            prepared = self._with_log_probs(prepared, "proximal_log_probs")
        if self._reference is not None:
            with self._reference.in_place_of_the_policy():
                prepared = self._with_log_probs(prepared, "ref_log_probs")
        if self._teacher is not None:
            with self._teacher.in_place_of(self._actor.model):
                prepared = self._with_log_probs(prepared, "teacher_log_probs")
        if wanted.kl:
            prepared = self._charged(prepared)
        kl = prepared.per_sample("kl") if wanted.kl else None
        values = self._values(prepared) if wanted.values else None
        gap = teacher_gap(prepared, objective) if wanted.teacher_gap else None
        rewards, custom = self._shaping.rewards(prepared.deal), self._shaping.advantages(prepared)
        return batches.with_advantages(
            prepared, objective, self._merged, kl=kl, values=values, teacher_gap=gap, rewards=rewards, custom=custom
        )

    def _optimized(self, batch: TrainBatch) -> list[StepResult]:
        """One optimizer step after another; none while only the critic is to learn."""
        results: list[StepResult] = []
        if batch.step < self._config.algorithm.num_critic_only_steps:
            return results
        for number, step in enumerate(batch.steps):
            loss, micro_batches = self._shaping.loss(batch, number), [one.packed for one in step]
            result = self._actor.train_step(micro_batches, loss, need_entropy=self._objective.entropy_coef != 0.0)
            self._watch_divergence(result)
            results.append(result)
        return results

    def _token_means(self, batch: TrainBatch) -> dict[str, float]:
        """Means of what trained tokens bring along, over all ranks. A collective."""
        fields = batch.steps[0][0].packed.fields
        numbers = {name: batch.per_sample(field) for name, field in TOKEN_MEANS.items() if field in fields}
        own = TokenSums.of(batch.masks(), numbers)
        return replace(own, sums=runtime.sum_over_data_parallel(own.sums)).means()

    def _inspect(self, batch: TrainBatch, results: list[StepResult]) -> None:
        """Writes what the step was made of, where that is asked for; warns where engine and trainer differ under equal weights."""
        monitoring = self._config.monitoring
        if monitoring.save_debug_train_data is not None:
            dumps.write_tensors(monitoring.save_debug_train_data, batch, results, runtime.rank())
        tokens = sum(result.metrics.get("agreement_tokens", 0.0) for result in results)
        difference = sum(result.metrics.get("agreement_abs_diff", 0.0) for result in results) / max(tokens, 1.0)
        if self._link is not None and difference > monitoring.logprob_alarm:
            self._log.warning("logprobs_differ", step=batch.step, mean_abs_diff=difference, tokens=int(tokens))
            detail = f"engine and trainer differ by {difference:.3g} on {int(tokens)} tokens of step {batch.step}"
            self._link.tell("logprobs_differ", detail)

    # --- with a critic

    def _charged(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the KL that its rewards are charged with; the critic gets it, too."""
        old = "rollout_log_probs" if self._objective.correction == "rollout" else "proximal_log_probs"
        kind = self._objective.kl_loss_type or "k1"
        batch = batches.with_field(
            batch, "kl", lambda one: kl_estimate(one.packed.fields[old], one.packed.fields["ref_log_probs"], kind) * one.packed.loss_mask
        )
        if self._exchange is not None:
            with together(f"writing the KL of step {batch.step}"):
                self._exchange.write("kl", batch.step, batch.named(batch.per_sample("kl")))
            if self._first:
                self._exchange.finish("kl", batch.step)
        return batch

    def _values(self, batch: TrainBatch) -> batches.PerSample:
        """The critic's values of this rank's samples; the order to train came when all were there."""
        assert self._exchange is not None  # of an objective with a critic
        with together(f"reading the values of step {batch.step}"):
            names = [batch.deal.name(number) for number in batch.numbers]
            return dict(zip(batch.numbers, self._exchange.read("values", batch.step, names), strict=True))

    # --- the warm start

    def _warm_start(self) -> None:
        sft, actor = self._config.sft, self._actor
        if sft.sft_data is not None:
            self._state("warm start")
            demonstrations = Demonstrations(self._config, Tokenizer(self._config.model.hf_checkpoint))
            decay = sft.sft_steps if sft.sft_lr_decay_style != "constant" else 0
            actor.reset_optimizer(
                lr=sft.sft_lr, lr_warmup_steps=sft.sft_warmup_iters, lr_decay_steps=decay, lr_decay_style=sft.sft_lr_decay_style
            )
            for step in range(sft.sft_steps):
                micro_batches = batches.micro_batches(
                    demonstrations.batch(step),
                    self._objective,
                    dp_rank=actor.data_parallel_rank,
                    dp_size=actor.data_parallel_size,
                    max_tokens=self._max_tokens,
                    vocab_size=actor.architecture.vocab_size,
                )
                result = actor.train_step(micro_batches, SftLoss(), temperature=1.0)
                self._watch_divergence(result)
                if self._record is not None:
                    self._record.sft(step + 1, sft.sft_steps, result)
            actor.reset_optimizer()
        if needs(self._objective).reference:
            actor.save_hf(self._places.reference)
        self._progress.sft_done = True
        self._save()

    # --- checkpoints

    def _save(self) -> None:
        """The final checkpoint comes with HF weights."""
        super()._save()
        if self._saving == self._config.rollout.num_rollout and self._config.trainer.save_hf:
            self._actor.save_hf(self._places.hf)

    def _tell_durable(self) -> None:
        """Tells the buffer of steps that a checkpoint holds, with a critic both roles' checkpoints: their payloads may go."""
        if self._link is None or self._link.stopping or (steps := self._saved()) <= self._durable:  # a resume tells what a stop has not
            return
        if self._exchange is not None:
            self._exchange.save("actor", steps)
            self._exchange.forget("values", steps)
            steps = min(steps, self._exchange.saved("critic"))
        if steps > self._durable:
            with contextlib.suppress(StopAsked):
                self._link.durable(steps)
                self._durable = steps
