"""The critic's training loop, as every rank runs it: values for each batch's tokens, then a step on how far they were from the returns.

Source: Schulman et al. 2017 (arXiv:1707.06347), the value function of PPO, as a model of its own.
"""

from __future__ import annotations

import time

from services.trainer import batches
from services.trainer.actor_critic_exchange import ActorCriticExchange
from services.trainer.batches import TrainBatch
from services.trainer.commands import Leave, Train, Value, Wait
from services.trainer.control_client import ControlClient
from services.trainer.loss_inputs import LossInputs
from services.trainer.megatron.runtime import together
from services.trainer.metrics_logger import MetricsLogger
from services.trainer.objective import ValueLoss, needs
from services.trainer.role_worker import RoleWorker
from services.trainer.step_scheduler import CriticStepScheduler
from shared.config.run_config import RunConfig
from shared.schema.messages import Batch
from shared.store.payload_store import BlockingStore


class Critic(RoleWorker):
    """One rank of the critic.

    Args:
        store, link, exchange: as `RoleWorker` takes them.
    """

    def __init__(self, config: RunConfig, store: BlockingStore, link: ControlClient | None, exchange: ActorCriticExchange | None) -> None:
        super().__init__(config, store, link, "critic", exchange)
        self._shaping = LossInputs(config, self._objective, self._store)
        self._objective = self._objective.model_copy(
            update={"use_opd": False, "normalize_advantages": False}
        )  # neither touches the returns
        self._charged = needs(self._objective).kl
        self._valued: TrainBatch | None = None
        self._told = 0
        self._record: MetricsLogger | None = None
        if link is not None:
            self._record = MetricsLogger(link, self._places.tensorboard_of_critic, config, self._actor, "critic")
            self._conductor = CriticStepScheduler(link, config.trainer.batch_timeout, self._numbers, charged=self._charged)

    def run(self) -> None:
        """Trains until the run is done or a stop is asked for; everything it needs to go on is then on disk."""
        self._resume()
        self._tell_saved()
        self._state("ready")
        while True:
            match self._order():
                case Value(batch=batch):
                    self._valued = self._value(batch)
                case Train():
                    self._train()
                    if self._is_save_due():
                        self._save()
                case Leave(done=done):
                    self._save_before_leaving(done)
                    self._tell_saved()
                    break
                case Wait():
                    pass
            self._tell_saved()

    def close(self) -> None:
        if self._record is not None:
            self._record.close()
        super().close()

    def _value(self, batch: Batch) -> TrainBatch:
        """Values under the weights before the step: for the actor's advantages, and for the returns that the step learns."""
        prepared = self._assembled(batch)
        found = dict(zip(map(id, prepared.micro_batches()), self._actor.values(prepared.micro_batches()), strict=True))
        prepared = batches.with_field(prepared, "values", lambda one: found[id(one.packed)].cpu() * one.packed.loss_mask)
        with together(f"writing the values of step {batch.step}"):
            self._numbers.write("values", batch.step, prepared.named(prepared.per_sample("values")))
        if self._first:
            self._numbers.finish("values", batch.step)
        return prepared

    def _train(self) -> None:
        prepared = self._valued
        assert prepared is not None  # the order before this one
        started = time.time()
        kl = None
        if self._charged:
            with together(f"reading the KL of step {prepared.step}"):
                names = [prepared.deal.name(number) for number in prepared.numbers]
                kl = dict(zip(prepared.numbers, self._numbers.read("kl", prepared.step, names), strict=True))
        values = prepared.per_sample("values")
        rewards = self._shaping.rewards(prepared.deal)
        prepared = batches.with_advantages(prepared, self._objective, self._merged, kl=kl, values=values, rewards=rewards)
        loss, results = ValueLoss(self._objective.value_clip), []
        for step in prepared.steps:
            result = self._actor.train_step([one.packed for one in step], loss)
            self._watch_divergence(result)
            results.append(result)
        self._progress.steps, self._valued = prepared.step + 1, None
        if self._record is not None:
            self._record.critic(prepared, results, started, time.time())

    def _tell_saved(self) -> None:
        """The actor tells the buffer, once both have saved."""
        if self._first and self._saved() > self._told:
            self._told = self._saved()
            self._numbers.save("critic", self._told)
            self._numbers.forget("kl", self._told)

    @property
    def _numbers(self) -> ActorCriticExchange:
        assert self._exchange is not None  # of an objective with a critic
        return self._exchange
