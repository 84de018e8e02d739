"""The training loop, as every rank runs it.

Warm start, then: take an order; push the weights, or train a batch, report it, save now and then. What a step means is in
`services.trainer.objective`; which batch comes next is the buffer's; what to do next is `services.trainer.conductor`'s.
"""

from __future__ import annotations

import time
from dataclasses import asdict

import structlog

from services.trainer import batches, settings
from services.trainer.actor import Actor, StepResult, latest_step
from services.trainer.batches import TrainBatch
from services.trainer.conductor import Conductor
from services.trainer.link import Link
from services.trainer.megatron import DEVICE_TYPE
from services.trainer.megatron.reference import FrozenWeights
from services.trainer.objective import PolicyLoss, SftLoss
from services.trainer.orders import Leave, OrderChannel, Push, Train, Wait
from services.trainer.packing import PackedBatch
from services.trainer.progress import Places, Progress
from services.trainer.push import Pusher
from services.trainer.record import Record
from services.trainer.sft import Demonstrations
from shared.config import RunConfig
from shared.errors import MyxoError
from shared.messages import Trained
from shared.store import BlockingStore
from shared.tokenizer import Tokenizer
from shared.versions import version_after

SKIPPED_IN_A_ROW = 10
"""Optimizer steps without a finite gradient after which training has failed."""


class TrainingDiverged(MyxoError):
    """Loss or gradient stayed non-finite."""


class Trainer:
    """One rank of the trainer.

    Args:
        link: rank 0's link to the bus; None on the other ranks.
    """

    def __init__(self, config: RunConfig, redis_url: str, link: Link | None) -> None:
        self._config, self._link, self._log = config, link, structlog.get_logger()
        self._places = Places(config.run.root)
        self._objective = settings.objective_config(config)
        self._store = BlockingStore(redis_url)
        self._state("loading the model")
        self._actor = Actor.create(settings.actor_config(config), config.model.hf_checkpoint)
        self._channel = OrderChannel(config.trainer.collective_timeout)
        self._progress = Progress()
        self._reference: FrozenWeights | None = None
        self._skipped = 0
        self._record: Record | None = None
        self._pusher: Pusher | None = None
        self._conductor: Conductor | None = None
        if link is not None:
            self._record = Record(link, self._places.tensorboard)
            backend = "nccl" if DEVICE_TYPE == "cuda" else "gloo"
            self._pusher = Pusher(link, backend, config.weights.push_timeout)
            self._conductor = Conductor(link, self._pusher, config.trainer.batch_timeout)

    def run(self) -> None:
        """Trains until the run is done or a stop is asked for; everything it needs to go on is then on disk."""
        self._resume()
        if not self._progress.sft_done:
            self._warm_start()
        if self._objective.kl_loss_coef:
            self._load_reference()
        self._state("ready")
        saved = self._progress.steps
        while True:
            match self._order():
                case Push(version=version):
                    self._push(version)
                case Train(batch=batch):
                    self._train(batches.read(batch, self._store, self._objective, self._config.trainer.num_steps_per_rollout))
                    if self._is_save_due():
                        saved = self._save()
                case Wait():
                    pass
                case Leave(done=done):
                    if not done and saved < self._progress.steps:
                        self._save()
                    break

    def close(self) -> None:
        """Lets go of groups, files and connections."""
        if self._record is not None:
            self._record.close()
        if self._pusher is not None:
            self._pusher.close()
        self._store.close()
        self._actor.close()

    # --- one order at a time

    def _order(self) -> Train | Push | Wait | Leave:
        if self._conductor is None:
            return self._channel.receive()
        return self._channel.send(self._conductor.next(self._progress.steps, self._version))

    def _push(self, version: int) -> None:
        buckets = self._actor.export(self._config.weights.update_weight_buffer_size)
        if self._pusher is None or self._conductor is None or self._record is None:
            for _ in buckets:
                pass
            return
        result = self._pusher.push(version, self._conductor.targets, buckets)
        if result is not None:
            self._log.info("weights_pushed", **asdict(result))
            self._record.push(result)

    def _train(self, batch: TrainBatch) -> None:
        started = time.time()
        loss = PolicyLoss(self._objective).at_version(batch.version)
        results = []
        for micro_batches in self._prepared(batch):
            result = self._actor.train_step(micro_batches, loss, need_entropy=self._objective.entropy_coef != 0.0)
            self._watch_divergence(result)
            results.append(result)
        ended = time.time()
        self._progress.steps = batch.step + 1
        if self._record is not None:
            self._record.step(batch, results, started, ended)
        if self._link is not None:
            self._link.trained(Trained(step=batch.step, version=batch.version, started=started, ended=ended))

    def _prepared(self, batch: TrainBatch) -> list[list[PackedBatch]]:
        """Micro-batches of each optimizer step, with proximal and reference log-probs where the objective needs them."""
        actor, trainer = self._actor, self._config.trainer
        steps = [
            batches.micro_batches(
                samples,
                self._objective,
                dp_rank=actor.data_parallel_rank,
                dp_size=actor.data_parallel_size,
                max_tokens=trainer.max_tokens_per_gpu,
                vocab_size=actor.architecture.vocab_size,
            )
            for samples in batch.optimizer_steps
        ]
        if len(steps) > 1:  # with a single step the policy itself is the proximal one
            steps = [self._with_log_probs(micro_batches, "proximal_log_probs") for micro_batches in steps]
        if self._reference is not None:
            with self._reference.in_place_of(actor.model):
                steps = [self._with_log_probs(micro_batches, "ref_log_probs") for micro_batches in steps]
        return steps

    def _with_log_probs(self, micro_batches: list[PackedBatch], field: str) -> list[PackedBatch]:
        log_probs = self._actor.log_probs(micro_batches)
        return [batch.with_fields(**{field: values.cpu()}) for batch, values in zip(micro_batches, log_probs, strict=True)]

    def _watch_divergence(self, result: StepResult) -> None:
        if result.skipped is None:
            self._skipped = 0
            return
        self._skipped += 1
        self._log.warning("optimizer_step_skipped", step=self._progress.steps, reason=result.skipped, in_a_row=self._skipped)
        if self._skipped >= SKIPPED_IN_A_ROW:
            raise TrainingDiverged(f"{self._skipped} optimizer steps in a row were skipped, the last because {result.skipped}")

    # --- the warm start and the reference

    def _warm_start(self) -> None:
        sft, trainer, actor = self._config.sft, self._config.trainer, self._actor
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
                    max_tokens=trainer.max_tokens_per_gpu,
                    vocab_size=actor.architecture.vocab_size,
                )
                result = actor.train_step(micro_batches, SftLoss(), temperature=1.0)
                self._watch_divergence(result)
                if self._record is not None:
                    self._record.sft(step + 1, sft.sft_steps, result)
            actor.reset_optimizer()
        if self._objective.kl_loss_coef:
            actor.save_hf(self._places.reference)
        self._progress.sft_done = True
        self._save()

    def _load_reference(self) -> None:
        self._reference = FrozenWeights.from_hf(self._actor.model, self._places.reference)

    # --- checkpoints

    def _resume(self) -> None:
        step = latest_step(self._places.checkpoints)
        if step is None:
            return
        self._state("loading the checkpoint")
        self._progress = Progress.from_extra(self._actor.load_checkpoint(self._places.checkpoints, step))
        self._log.info("resumed", steps=self._progress.steps, version=self._version)
        if self._link is not None and self._progress.steps:
            self._link.durable(self._progress.steps)

    def _is_save_due(self) -> bool:
        steps = self._progress.steps
        return steps % self._config.trainer.save_interval == 0 or steps == self._config.rollout.num_rollout

    def _save(self) -> int:
        """Writes a checkpoint and tells the buffer. The final one comes with HF weights."""
        started, steps = time.monotonic(), self._progress.steps
        self._actor.save_checkpoint(self._places.checkpoints, steps, self._progress.as_extra(), keep=self._config.trainer.keep_checkpoints)
        if steps == self._config.rollout.num_rollout and self._config.trainer.save_hf:
            self._actor.save_hf(self._places.hf)
        self._log.info("checkpoint_saved", steps=steps, seconds=round(time.monotonic() - started, 2))
        if self._link is not None and steps and not self._link.stopping:  # the buffer may be gone by then; a resume tells it
            self._link.durable(steps)
        return steps

    # --- small things

    @property
    def _version(self) -> int:
        return version_after(self._progress.steps, self._config.weights.update_weights_interval, self._config.rollout.num_rollout)

    def _state(self, state: str) -> None:
        if self._link is not None:
            self._link.set_state(state)
