"""The supervised warm start: demonstrations from a JSONL file, in an order that the seed alone gives."""

from __future__ import annotations

import numpy as np

from services.trainer.packing import TrainSample
from shared.config.run_config import RunConfig
from shared.data.demonstrations import DemonstrationFile
from shared.data.row_order import EpochOrder
from shared.data.tokenizer import Tokenizer


class Demonstrations:
    """The demonstrations of a run (`shared.data.demonstrations`), tokenised on demand."""

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        self._file = DemonstrationFile(config, tokenizer)
        self._size = config.sft.sft_batch_size
        self._order = EpochOrder(len(self._file), shuffle=True, seed=config.trainer.seed)

    def batch(self, step: int) -> list[TrainSample]:
        """The demonstrations of one optimizer step: epoch after epoch, each in an order of its own."""
        return [self._sample(self._order.row(number)) for number in range(step * self._size, (step + 1) * self._size)]

    def _sample(self, row: int) -> TrainSample:
        one = self._file[row]
        return TrainSample(
            prompt_tokens=one.prompt,
            response_tokens=one.response,
            loss_mask=one.mask,
            rollout_log_probs=np.zeros(len(one.response), np.float32),
            versions=np.zeros(len(one.response), np.int32),
            advantage=0.0,
            group=f"sft-{row}",
            rollout_id=row,
        )
