"""When an engine that does not answer counts as hung."""

from services.rollout.engine.engine_client import EngineHealth


def test_silence_counts_from_the_first_probe_that_failed() -> None:
    health = EngineHealth(60.0)
    assert health.failed("no answer", 10.0, 40.0) == ""
    assert health.failed("no answer", 50.0, 69.0) == ""
    assert health.failed("no answer", 60.0, 70.0) == "it has answered no probe for 60 s, though its processes are there: no answer"


def test_an_answer_and_a_pause_begin_anew() -> None:
    for forget in (EngineHealth.answered, EngineHealth.idle):
        health = EngineHealth(60.0)
        health.failed("no answer", 10.0, 40.0)
        forget(health)
        assert health.failed("no answer", 50.0, 80.0) == ""
        assert health.failed("no answer", 90.0, 110.0).startswith("it has answered no probe for 60 s")
