"""The critic's training loop, as every rank runs it: values for each batch's tokens, then a step on their distance from the returns.

Source: Schulman et al. 2017 (arXiv:1707.06347), the value function of PPO, as a model of its own.
"""

import time
from collections.abc import Sequence

from torch import Tensor

from services.trainer.actor_critic_exchange import ActorCriticExchange
from services.trainer.batch_metrics import empty_table
from services.trainer.batches import TrainBatch
from services.trainer.commands import Leave, Train, Value, Wait
from services.trainer.control_client import ControlClient
from services.trainer.loss_inputs import LossInputs
from services.trainer.objective.advantage import needs
from services.trainer.objective.loss import ValueLoss
from services.trainer.packing import PackedBatch
from services.trainer.partition import Partition
from services.trainer.role_worker import RoleWorker
from services.trainer.step_scheduler import CriticStepScheduler
from shared.config.run_config import RunConfig
from shared.schema.messages import Batch
from shared.store.payload_store import BlockingStore


class Critic(RoleWorker):
    """One rank of the critic.

    Args:
        store, control, exchange: as `RoleWorker` takes them.
    """

    def __init__(self, config: RunConfig, store: BlockingStore, control: ControlClient | None, exchange: ActorCriticExchange) -> None:
        super().__init__(config, store, control, "critic", exchange)
        self._shared = exchange
        # neither distillation nor whitening touches the returns
        self._objective = self._objective.model_copy(update={"use_opd": False, "normalize_advantages": False})
        self._loss_inputs = LossInputs(self._objective, self._custom, store)
        self._with_kl = needs(self._objective).kl
        self._valued: TrainBatch | None = None
        self._reported = 0
        if control is not None:
            timeouts = {"batch_timeout": config.trainer.batch_timeout, "evaluation": config.eval.eval_timeout}
            self._scheduler = CriticStepScheduler(control, exchange=exchange, with_kl=self._with_kl, **timeouts)

    def run(self) -> None:
        """Trains until the run is done or a stop is asked for; all that a resume needs is then on disk."""
        self._resume()
        self._report_saved()
        self._set_state("ready")
        while True:
            match self._next_command():
                case Value(batch=batch):
                    self._valued = None
                    self._report_activity(f"computing the values of step {batch.step}")
                    with self._refusing():
                        self._valued = self._value(batch)
                    if self._valued is None and isinstance(self._scheduler, CriticStepScheduler):
                        self._scheduler.forget()
                case Train(batch=batch):
                    self._report_activity(f"training step {batch.step}")
                    self._train()
                    self._save_if_due()
                case Leave(done=done):
                    self._finish_saves(done)
                    return self._report_saved()
                case Wait(save=save):
                    if save and self._room_made < self._progress.steps:
                        self._save_at_once()
            self._report_saved()

    def _value(self, batch: Batch) -> TrainBatch:
        prepared = TrainBatch(Partition(batch, [], []), empty_table(0), [])
        if batch.groups:  # else all of them were refused
            prepared = self._computed(self._assembled(batch), "values", self._trained_values)
        self._give("values", prepared)
        return prepared

    def _trained_values(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [values.cpu() * batch.loss_mask for values, batch in zip(self._actor.values(batches), batches, strict=True)]

    def _train(self) -> None:
        prepared = self._valued
        assert prepared is not None  # the command before this one
        started = time.time()
        results = []
        if prepared.steps:
            if self._with_kl:
                prepared = self._with_received("kl", prepared)
            prepared = self._loss_inputs.with_advantages(prepared)
            loss = ValueLoss(self._objective.value_clip)
            results = self._optimized(prepared, lambda _: loss)
        self._progress.steps, self._valued = prepared.step + 1, None
        if self._metrics is not None and results:
            self._metrics.critic(prepared, results, started, time.time())

    def _report_saved(self) -> None:
        """Publishes the saved steps to the actor, which reports to the buffer once both have saved."""
        if self._control is not None and (steps := self._kept_from()) > self._reported:
            self._reported = steps
            self._shared.save("critic", self._reported)
            self._shared.forget("kl", self._reported)
