"""The critic's training loop, as every rank runs it: values for each batch's tokens, then a step on how far they were from the returns.

Source: Schulman et al. 2017 (arXiv:1707.06347), the value function of PPO, as a model of its own.
"""

from __future__ import annotations

import time
from dataclasses import replace

from services.trainer import batches
from services.trainer.batches import TrainBatch
from services.trainer.conductor import CriticConductor
from services.trainer.exchange import Exchange
from services.trainer.job import Job
from services.trainer.link import Link
from services.trainer.megatron.runtime import together
from services.trainer.objective import ValueLoss, needs
from services.trainer.orders import Leave, Train, Value, Wait
from services.trainer.record import Record
from services.trainer.shaping import Shaping
from shared.config import RunConfig
from shared.messages import Batch
from shared.store import BlockingStore


class Critic(Job):
    """One rank of the critic.

    Args:
        store, link, exchange: as `Job` takes them.
    """

    def __init__(self, config: RunConfig, store: BlockingStore, link: Link | None, exchange: Exchange | None) -> None:
        super().__init__(config, store, link, "critic", exchange)
        self._shaping = Shaping(config, self._objective, self._store)
        self._objective = replace(self._objective, use_opd=False, normalize_advantages=False)  # neither touches the returns
        self._charged = needs(self._objective).kl
        self._valued: TrainBatch | None = None
        self._told = 0
        self._record: Record | None = None
        if link is not None:
            self._record = Record(link, self._places.tensorboard_of_critic, config, self._actor, "critic")
            self._conductor = CriticConductor(link, config.trainer.batch_timeout, self._numbers, charged=self._charged)

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
    def _numbers(self) -> Exchange:
        assert self._exchange is not None  # of an objective with a critic
        return self._exchange
