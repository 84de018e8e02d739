"""What tasks say of a response's text: the run's word, unless a set of held-out prompts has its own."""

from services.buffer.task_publisher import _sampling
from shared.config.rollout_section import RolloutSection
from tests.support.tables import table


@table(("run", "own", "said"), [(None, None, None), (True, None, True), (False, None, False), (False, True, True), (True, False, False)])
def test_special_tokens_are_left_out_as_the_run_says(run: bool | None, own: bool | None, said: bool | None) -> None:
    rollout = RolloutSection(num_rollout=1, rollout_batch_size=1, rollout_skip_special_tokens=run)
    assert _sampling(rollout, [], skip_special_tokens=own).skip_special_tokens is said
