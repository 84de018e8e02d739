"""The benchmark of the worker pool measures what it says, with the pool that needs no further package."""

from benchmarks.worker_pool import DEADLINE_S, ENDLESS, QUICK, calls_per_second, ours, table


async def test_the_figures_are_there() -> None:
    async with ours("exact", 1) as score:
        assert await score(QUICK, 60.0) == [1.0, 0.0, 1.0, 0.0] * 2
        assert await calls_per_second(score, QUICK, 20, 4) > 0
    assert DEADLINE_S > 0 and len(ENDLESS[0]) == 1
    row = {"quick_calls_per_s": 1000.4, "math_calls_per_s": 99.6, "late_ms": 40.0, "replaced_ms": 1200.0}
    assert table({"ours": row}).splitlines()[-1] == "| ours | 1000 | 100 | 40 ms | 1200 ms |"
