"""When the reference policy was made that a step is trained against."""

from services.trainer.reference_policy import made_at
from tests.support.tables import table


@table(("steps", "interval", "made"), [(0, None, 0), (99, None, 0), (0, 10, 0), (9, 10, 0), (10, 10, 10), (29, 10, 20), (3, 1, 3)])
def test_a_reference_holds_until_the_next(steps: int, interval: int | None, made: int) -> None:
    assert made_at(steps, interval) == made
