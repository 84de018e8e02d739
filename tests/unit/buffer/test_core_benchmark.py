"""The benchmark of the buffer's core trains all of its groups, by messages that the policy takes."""

from benchmarks.buffer_core import GROUPS_PER_BATCH, WINDOWS, group_bytes, run


def test_every_step_is_trained_and_scored_groups_are_held() -> None:
    core, windows = run(WINDOWS * GROUPS_PER_BATCH, samples=2, lot=4)
    assert core.state.trained == WINDOWS * GROUPS_PER_BATCH and len(windows) == WINDOWS
    assert core.state.dropped > 0 or core.state.dead > 0, "some fail or are stale"
    assert group_bytes(2, groups=50)["scored"] > 0
