"""The supervised warm start: demonstrations from a JSONL file, in an order that the seed alone gives."""

from collections.abc import Iterator

from services.trainer.actor import Actor, StepResult
from services.trainer.batches import demonstration_micro_batches
from services.trainer.objective.loss import SftLoss
from shared.config.algorithm import AlgorithmSection
from shared.config.run_config import RunConfig
from shared.data.demonstrations import DemonstrationFile
from shared.data.row_order import MixedOrder
from shared.data.tokenizer import Tokenizer
from shared.schema.sample import SampleLimits


def train_demonstrations(actor: Actor, config: RunConfig, objective: AlgorithmSection, max_tokens: int) -> Iterator[StepResult]:
    """Trains the run's demonstrations and yields each step's result; resets the optimizer after the last.

    Each epoch has an order of its own.

    Args:
        max_tokens: the most tokens of a micro-batch.
    """
    sft, file = config.sft, DemonstrationFile(config, Tokenizer(config.model.hf_checkpoint))
    order = MixedOrder([len(file)], [1.0], shuffle=True, seed=config.trainer.seed)
    actor.reset_optimizer(sft.schedule)
    alone = config.longest_sample > max_tokens
    rank, ranks = actor.data_parallel_rank, actor.data_parallel_size
    for first in range(0, sft.sft_steps * sft.sft_batch_size, sft.sft_batch_size):
        samples = [sample for index in range(first, first + sft.sft_batch_size) for sample in file.samples(order.row(index))]
        for sample in samples:
            sample.check(SampleLimits(vocabulary=actor.architecture.vocab_size))
        micro_batches = demonstration_micro_batches(samples, objective, dp_rank=rank, dp_size=ranks, max_tokens=max_tokens, alone=alone)
        yield actor.train_step(micro_batches, SftLoss(), temperature=1.0)
    actor.reset_optimizer()
