"""What a trainer says that it has trained, from the samples of a batch as its ranks read them."""

from collections.abc import Mapping, Sequence

import numpy as np

from shared.schema.digests import TrainedSample, attest
from shared.schema.messages import Attestation, Batch
from shared.schema.sample import Sample


def attested(batch: Batch, samples: Mapping[str, Sequence[Sample]]) -> Attestation:
    """The attestation of a batch. ``samples``: of each group, by its id."""
    found = []
    for group in batch.groups:
        for position, sample in enumerate(samples[group.group]):
            mask = (sample.mask != 0) & (sample.versions() >= batch.mask_below) & (position not in group.removed)
            oldest = int(sample.versions()[mask].min()) if mask.any() else 0
            found.append(TrainedSample(group.group, position, int(np.count_nonzero(mask)), oldest, sample.token_digest()))
    return attest(found)
