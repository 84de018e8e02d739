"""Finds the samples for which a pass over micro-batches fails, by making it for each sample alone, and has all ranks agree on them."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple

from services.trainer.batches import BadBatch, MicroBatch
from services.trainer.megatron import runtime
from services.trainer.megatron.passes import MicroBatchesFailed
from services.trainer.packing import BadSample, PackedBatch, separate
from services.trainer.partition import Partition
from services.trainer.untrainable import RefusedSample, Untrainable
from shared.runtime.tasks import describe
from shared.schema.messages import Batch


@contextlib.contextmanager
def agreed(batch: Batch, what: str) -> Iterator[None]:
    """Has all ranks refuse a batch if the body does on one of them, so that none trains it. As `runtime.together` besides.

    Raises Untrainable with the samples that any rank has refused: BadSample, Untrainable, or BadBatch, which means all groups.
    """
    refused: list[RefusedSample] = []
    with runtime.together(what):
        try:
            yield
        except Untrainable as error:
            refused = error.samples
        except BadSample as error:
            group, _, position = error.sample.rpartition("/")
            refused = [RefusedSample(group, int(position), f"{error.field}: {error.problem}")]
        except BadBatch as error:
            refused = [RefusedSample(group.group, 0, str(error)) for group in batch.groups]
    with runtime.deadline(what):
        if runtime.anywhere(bool(refused)):
            everywhere = [RefusedSample(*item) for each in runtime.gather_json(list(map(astuple, refused))) for item in each]
            raise Untrainable(batch.step, first_of_groups(everywhere))


@contextlib.contextmanager
def attributed(partition: Partition, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
    """Names the samples for which a pass of the body over this rank's micro-batches fails.

    Raises Untrainable on all ranks; the pass's own error where it fails for each sample of the rank, since that is no sample's fault.
    """
    try:
        yield
    except MicroBatchesFailed as failed:
        step = partition.batch.step
        with agreed(partition.batch, f"the attribution of what failed in step {step}"):
            if failed.errors:
                raise Untrainable(step, _culprits(partition, micro_batches, failed)) from failed
        raise


def refuse_infinite(partition: Partition, micro_batches: Sequence[MicroBatch], loss_of: Callable[[PackedBatch], float | None]) -> None:
    """Names the samples whose loss is not finite, after a step whose loss was not, on all ranks.

    Raises Untrainable, on all ranks. Where there is none, or no other, that is no sample's fault: it returns.

    Args:
        loss_of: the loss of one sample as a micro-batch of its own (`Actor.loss_alone`).
    """
    step, found, finite = partition.batch.step, [], 0
    for item in micro_batches:
        for sample, alone in zip(item.indices, separate(item.packed), strict=True):
            loss = loss_of(alone)
            if loss is not None and not math.isfinite(loss):
                found.append(_refused(partition, sample, f"its loss is {loss}"))
            finite += loss is not None and math.isfinite(loss)
    if runtime.anywhere(finite > 0) and runtime.anywhere(bool(found)):
        with agreed(partition.batch, f"the search for losses of step {step} that are not finite"):
            if found:
                raise Untrainable(step, first_of_groups(found))


def first_of_groups(samples: Sequence[RefusedSample]) -> list[RefusedSample]:
    """Returns the first sample of each group, in the groups' order."""
    return [sample for _, sample in sorted({sample.group: sample for sample in sorted(samples, reverse=True)}.items())]


def _culprits(partition: Partition, micro_batches: Sequence[MicroBatch], failed: MicroBatchesFailed) -> list[RefusedSample]:
    found = []
    for index in failed.errors:
        item = micro_batches[index]
        for sample, alone in zip(item.indices, separate(item.packed), strict=True):
            try:
                failed.attempt(alone)
            except Exception as error:
                found.append(_refused(partition, sample, describe(error)))
    if len(found) in (0, sum(len(item.indices) for item in micro_batches)):
        raise next(iter(failed.errors.values()))
    return first_of_groups(found)


def _refused(partition: Partition, sample: int, reason: str) -> RefusedSample:
    place = partition.items[sample]
    return RefusedSample(partition.batch.groups[place.group].group, place.position, reason)
