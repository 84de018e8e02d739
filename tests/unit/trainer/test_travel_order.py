"""The order in which a stage's units travel."""

from services.trainer.weights.stage_sender import travel_order


def test_large_units_travel_in_the_middle() -> None:
    assert travel_order(["embedding", "a", "b", "c", "d"], [900, 10, 20, 25, 25], 100) == ["a", "b", "embedding", "c", "d"]
    assert travel_order(["x", "y"], [900, 800], 100) == ["x", "y"] and travel_order([], [], 100) == []
