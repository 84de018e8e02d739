"""slime's log function of the user's for a batch's samples, ``custom_rollout_log_function_path``, called by the actor's rank 0."""

import structlog

from services.trainer.loss_inputs import scored
from services.trainer.objective.custom_objective import CustomFunctions
from services.trainer.partition import Partition
from shared.runtime.errors import MyxoError
from shared.store.payload_store import BlockingStore

ROLLOUT_LOG = "monitoring.custom_rollout_log_function_path"


class RolloutLog:
    """Calls the function that the run names, if it names one."""

    def __init__(self, custom: CustomFunctions, store: BlockingStore) -> None:
        self._custom, self._store = custom, store

    def wrote(self, partition: Partition, seconds: float) -> bool:
        """Returns whether the function has logged the batch in the place of Myxo. One that fails has not, which is an error in the log.

        Args:
            seconds: for which the trainer waited for the batch.
        """
        if ROLLOUT_LOG not in self._custom:
            return False
        step = partition.batch.step
        try:
            samples = scored(partition, self._store, self._custom.args.reward_key)
            return bool(self._custom.call(ROLLOUT_LOG, step, self._custom.args, samples, {}, seconds))
        except MyxoError as error:
            structlog.get_logger().error("rollout_log_failed", step=step, error=str(error))
            return False
