"""The supervised warm start: demonstrations from a JSONL file, in an order that the seed alone gives, response tokens trained."""

from __future__ import annotations

import numpy as np

from services.trainer.packing import TrainSample
from shared.config import RunConfig
from shared.errors import ConfigError
from shared.jsonl import JsonLines
from shared.order import EpochOrder
from shared.tokenizer import Tokenizer


class Demonstrations:
    """The demonstrations of a run, tokenised on demand.

    The prompt is text as in the prompt file; the response gets the model's first stop token appended, so that the policy learns to end.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer) -> None:
        assert config.sft.sft_data is not None  # only made for runs with a warm start
        self._lines = JsonLines(config.sft.sft_data, "sft.sft_data")
        self._sft, self._tokenizer = config.sft, tokenizer
        self._order = EpochOrder(len(self._lines), shuffle=True, seed=config.trainer.seed)
        if not tokenizer.stop_ids:
            raise ConfigError("model.hf_checkpoint", str(config.model.hf_checkpoint), "names no eos token for demonstrations to end with")
        self._end = tokenizer.stop_ids[0]

    def batch(self, step: int) -> list[TrainSample]:
        """The demonstrations of one optimizer step: epoch after epoch, each in an order of its own."""
        size = self._sft.sft_batch_size
        return [self._sample(self._order.row(number)) for number in range(step * size, (step + 1) * size)]

    def _sample(self, row: int) -> TrainSample:
        prompt = self._tokenizer.encode(self._lines.text(row, self._sft.sft_prompt_key))
        response = self._tokenizer.encode(self._lines.text(row, self._sft.sft_response_key))
        response = np.append(response, np.int32(self._end)).astype(np.int32)
        return TrainSample(
            prompt_tokens=prompt,
            response_tokens=response,
            loss_mask=np.ones(len(response), np.uint8),
            rollout_log_probs=np.zeros(len(response), np.float32),
            versions=np.zeros(len(response), np.int32),
            advantage=0.0,
            group=f"sft-{row}",
            rollout_id=row,
        )
