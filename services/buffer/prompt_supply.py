"""The prompts of a run in the buffer: opened once, counted in log and gauges."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from services.buffer import prompt_results
from services.buffer.data_fingerprints import Fingerprints, fingerprints
from services.buffer.state import BufferState
from shared.config.eval_views import eval_views
from shared.config.run_config import RunConfig
from shared.data.data_source import DrawnPrompts, PromptStream
from shared.data.prompts import Prompt, PromptFile, TrainingPrompts, eval_prompts
from shared.data.tokenizer import Tokenizer
from shared.runtime.errors import ConfigError
from shared.runtime.telemetry import Metrics, MetricSpec, declare_metrics
from shared.schema.ledger import GroupsAdmitted, LedgerRecord, eval_group_parts, group_number
from shared.service.service_base import Service

declare_metrics(
    MetricSpec("prompts", "prompts", "of each set, those left out aside", labels=("of",)),
    MetricSpec("prompts_left_out", "prompts", "that the run leaves out, by why", when="where there are such", labels=("of", "reason")),
    MetricSpec("prompt_results", "prompts", "whose results the run remembers", when="where the order of prompts depends on their results"),
)

TRAINING = "training"


@dataclass(frozen=True)
class PromptSupply:
    """Training prompts, None where nothing is trained, and the sets of held-out ones by name. ``stop_ids``: ids that end a response.
    ``fingerprints``: what their files were when they were opened."""

    training: PromptStream | None
    heldout: dict[str, PromptFile]
    stop_ids: list[int]
    fingerprints: Fingerprints

    @property
    def drawn(self) -> bool:
        """Returns whether training prompts come from a source of the user's, which may take long."""
        return isinstance(self.training, DrawnPrompts)

    def of_group(self, name: str) -> Prompt | None:
        """Returns the prompt of a group; None for one that was held out before and is not any more. Raises ConfigError."""
        parts = eval_group_parts(name)
        if parts is None:
            return None if self.training is None else self.training.at(group_number(name))
        prompts = self.heldout.get(parts[0], ())
        return prompts[parts[2]] if parts[2] < len(prompts) else None

    def follow(self, state: BufferState, record: LedgerRecord) -> None:
        """Takes note of what a record, about to be folded into the state, holds for a source that hears results."""
        if isinstance(self.training, DrawnPrompts) and self.training.observes:
            prompt_results.follow(self.training.results, state, record)
            if isinstance(record, GroupsAdmitted):
                self.training.follow()

    def sets(self) -> dict[str, PromptStream | PromptFile]:
        """Returns the run's sets of prompts, by name."""
        training = {} if self.training is None else {TRAINING: self.training}
        return {**training, **{f"eval/{name}": prompts for name, prompts in self.heldout.items()}}

    def gauge(self, metrics: Metrics) -> None:
        """Sets ``prompts`` and ``prompts_left_out``."""
        if isinstance(self.training, DrawnPrompts) and self.training.observes:
            metrics.set("prompt_results", len(self.training.results))
        for name, prompts in self.sets().items():
            metrics.set("prompts", len(prompts), of=name)
            for reason, count in prompts.left_out.items():
                metrics.set("prompts_left_out", count, of=name, reason=reason)


async def open_prompts(service: Service) -> PromptSupply:
    """Opens the run's prompts, in a thread: long files take seconds, and minutes where some of their prompts are left out.

    Raises ConfigError.
    """

    def report(error: ConfigError) -> None:
        service.log.error("source_not_told", error=str(error))

    supply = await asyncio.to_thread(_open, service.config, report)
    for name, prompts in supply.sets().items():
        first = None if prompts.first_left_out is None else str(prompts.first_left_out)
        service.log.info("prompts", of=name, count=len(prompts), left_out=prompts.left_out, first_left_out=first)
    supply.gauge(service.metrics)
    return supply


def _open(config: RunConfig, report: Callable[[ConfigError], None]) -> PromptSupply:
    tokenizer = Tokenizer(config.model.hf_checkpoint)
    training: PromptStream | None = None
    if config.has_steps:
        training = TrainingPrompts(config, tokenizer) if config.data.data_source is None else DrawnPrompts(config, tokenizer, report)
    heldout = {view.name: eval_prompts(view, tokenizer) for view in eval_views(config)}
    return PromptSupply(training, heldout, tokenizer.stop_ids, fingerprints(config))
