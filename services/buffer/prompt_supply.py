"""The prompts of a run as the buffer has them: opened once, counted in log and gauges."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from shared.config.run_config import RunConfig
from shared.data.data_source import DrawnPrompts
from shared.data.prompts import PromptFile, PromptStream, TrainingPrompts, eval_prompts
from shared.data.tokenizer import Tokenizer
from shared.runtime.service_base import Service
from shared.runtime.telemetry import Metrics

TRAINING, HELDOUT = "training", "heldout"


@dataclass(frozen=True)
class PromptSupply:
    """``stop_ids``: token ids at which the model ends a response."""

    training: PromptStream
    heldout: PromptFile | None
    stop_ids: list[int]

    def gauge(self, metrics: Metrics) -> None:
        """Sets ``prompts`` and ``prompts_left_out``."""
        for of, prompts in self._sets().items():
            metrics.set("prompts", len(prompts), of=of)
            for reason, count in prompts.left_out.items():
                metrics.set("prompts_left_out", count, of=of, reason=reason)

    def _sets(self) -> dict[str, PromptStream | PromptFile]:
        return {TRAINING: self.training} if self.heldout is None else {TRAINING: self.training, HELDOUT: self.heldout}


async def opened(service: Service) -> PromptSupply:
    """Opens the run's prompts, in a thread: long files take seconds, and minutes where some of their prompts are left out.

    Raises ConfigError.
    """
    prompts = await asyncio.to_thread(_open, service.config)
    for of, some in prompts._sets().items():
        first = some.first_left_out
        service.log.info("prompts", of=of, count=len(some), left_out=some.left_out, first_left_out=None if first is None else str(first))
    prompts.gauge(service.metrics)
    return prompts


def _open(config: RunConfig) -> PromptSupply:
    tokenizer = Tokenizer(config.model.hf_checkpoint)
    training: PromptStream = TrainingPrompts(config, tokenizer) if config.data.data_source is None else DrawnPrompts(config, tokenizer)
    return PromptSupply(training, eval_prompts(config, tokenizer), tokenizer.stop_ids)
