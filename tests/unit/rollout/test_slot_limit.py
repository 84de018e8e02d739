"""Slots by an engine's load: more while it has room, fewer once its memory is full."""

from services.rollout.engine.capabilities import parse_load
from services.rollout.slot_limit import CALM_READINGS, MOST, QUEUED_READINGS, START, EngineLoad, SlotLimit


def test_slots_grow_while_all_are_used_and_the_engine_has_room() -> None:
    limit = SlotLimit(None, least=8)
    assert limit.note(EngineLoad(START, 0, 0.2), held=START - 1) == START, "not all are used"
    grown = limit.note(EngineLoad(START, 0, 0.2), held=START)
    assert grown > START
    assert limit.note(EngineLoad(grown, 0, 0.95), held=grown) == grown, "the running ones will need the rest"
    for _ in range(100):
        grown = limit.note(EngineLoad(grown, 0, 0.2), held=grown)
    assert grown == MOST


def test_requests_that_wait_in_the_engine_for_long_lower_the_limit() -> None:
    limit = SlotLimit(None, least=8)
    loads = [EngineLoad(running=40, queued=216, kv_usage=0.99)] * QUEUED_READINGS
    slots = [limit.note(load, held=START) for load in loads]
    assert slots[:-1] == [START] * (QUEUED_READINGS - 1), "a burst of new requests has to be computed first"
    assert 40 < slots[-1] <= 46
    assert limit.note(EngineLoad(40, 4, 0.5), held=45) == slots[-1], "one in eight keeps the engine busy"


def test_a_retraction_lowers_the_limit_and_keeps_it_low_for_a_while() -> None:
    limit = SlotLimit(None, least=8)
    limit.note(EngineLoad(200, 0, 0.5, retracted=7), held=START)
    lowered = limit.note(EngineLoad(100, 0, 0.97, retracted=9), held=100)
    assert lowered == 90
    calm = [limit.note(EngineLoad(lowered, 0, 0.5, retracted=9), held=lowered) for _ in range(CALM_READINGS)]
    assert calm[:-1] == [lowered] * (CALM_READINGS - 1)
    assert calm[-1] > lowered


def test_a_new_engines_count_is_no_retraction_and_a_group_fits_always() -> None:
    limit = SlotLimit(None, least=8)
    limit.note(EngineLoad(100, 0, 0.5, retracted=3), held=0)
    limit.renew()
    assert limit.note(EngineLoad(1, 0, 0.1, retracted=1), held=0) == START
    assert limit.note(EngineLoad(1, 0, 1.0, retracted=2), held=START) == 8


def test_slots_that_the_run_names_follow_nothing() -> None:
    limit = SlotLimit(5, least=8)
    assert limit.note(EngineLoad(5, 99, 1.0, retracted=9), held=5) == limit.slots == 5


PAGE = """
# HELP sglang:num_running_reqs The number of running requests.
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 31.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",priority="1"} 30.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 4.0
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.25
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0",dp_rank="1"} 0.5
sglang:num_retracted_requests_total{engine_type="unified",model_name="m",tp_rank="0"} 2.0
sglang:num_running_reqs_offline_batch{engine_type="unified",model_name="m"} 9.0
"""


def test_an_engines_page_tells_its_load() -> None:
    assert parse_load(PAGE) == EngineLoad(running=31, queued=4, kv_usage=0.5, retracted=2)
    assert parse_load('sglang:realtime_tokens_total{mode="decode"} 5\n') is None
