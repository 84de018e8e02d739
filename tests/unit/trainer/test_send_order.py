"""The order in which a stage's units travel."""

from services.trainer.weights.stage_sender import send_order


def test_large_units_travel_in_the_middle() -> None:
    assert send_order(["embedding", "a", "b", "c", "d"], [900, 10, 20, 25, 25], 100) == ["a", "b", "embedding", "c", "d"]
    assert send_order(["x", "y"], [900, 800], 100) == ["x", "y"] and send_order([], [], 100) == []
