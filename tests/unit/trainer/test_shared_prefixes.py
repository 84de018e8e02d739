"""What sequences share, against a set of all beginnings."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.packing import shared_prefixes

SEQUENCES = st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 151_935]), min_size=1, max_size=12), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(SEQUENCES)
def test_every_beginning_is_computed_exactly_once_for_each_token_that_follows(sequences):
    starts = np.cumsum([0, *map(len, sequences)]).tolist()
    tokens = np.concatenate([np.array(sequence, np.int64) for sequence in sequences])
    found = shared_prefixes(tokens, starts)
    beginnings = [(*sequence[: t + 2],) for sequence in sequences for t in range(len(sequence))]
    last = [t + 1 == len(sequence) for sequence in sequences for t in range(len(sequence))]
    assert len(found.computed) == len({b for b, ends in zip(beginnings, last, strict=True) if not ends}) + len(sequences)
    assert len(found.back) == len(tokens) and (np.diff(found.computed) > 0).all()
    for index, source in enumerate(found.computed[found.back].tolist()):
        assert beginnings[source] == beginnings[index]
        assert not last[index] or source == index, "the last token of a sequence predicts nothing, and is its own"
    assert found.shared.sum() + len(found.computed) == len(tokens)
    for shared, start, stop in zip(found.shared.tolist(), starts[:-1], starts[1:], strict=True):
        own = np.arange(start + shared, stop)
        assert np.array_equal(found.computed[found.back[own]], own)
    assert found.saved == 1 - len(found.computed) / len(tokens)


def test_a_fork_and_a_conversation_that_goes_on():
    prompt = [7, 8, 9, 10]
    found = shared_prefixes(np.array([*prompt, 1, 2, *prompt, 3, *prompt, 1, 2, 4, 5]), [0, 6, 11, 19])
    # of 6, 5 and 8 tokens: one prompt but for its last token, which predicts 1 and 3; 1 2 4 5 continues from 1 2, whose 2 predicts nothing
    assert found.shared.tolist() == [0, 3, 5]
    assert found.back.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 6, 7, 0, 1, 2, 3, 4, 8, 9, 10]
