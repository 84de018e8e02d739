"""The phases of a start are read from the logs of those who start."""

import json
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.start_up import kernels, table
from benchmarks.start_up_phases import EVENTS, milestones, phases
from tests.support import tables

START = 1_000_000.0


def line(event: str, seconds: float) -> str:
    return json.dumps({"event": event, "timestamp": datetime.fromtimestamp(START + seconds, UTC).isoformat()}) + "\n"


def engine_line(text: str, seconds: float) -> str:
    return f"[{datetime.fromtimestamp(START + seconds, UTC):%Y-%m-%d %H:%M:%S}] {text}\n"


def test_phases_lie_between_milestones_and_the_first_push_waits_for_both(tmp_path: Path) -> None:
    services = [line("launch_begun", 2), line("servers_started", 3), line("service_started", 3.5), line("service_started", 9)]
    (tmp_path / "launcher.log").write_text("".join(services))
    rollout = [line("first_tokens", -20), line("engine_starting", 6), line("engine_ready", 40), line("first_tokens", 55)]
    (tmp_path / "rollout-0.log").write_text("".join(rollout))
    trainer = [line("model_loading", 20), line("model_loaded", 50), line("weights_pushed", 52), line("weights_pushed", 70)]
    (tmp_path / "trainer-0.log").write_text("a warning\n" + "".join(trainer) + '{"event": "weights_pu')
    engine = [
        ("server_args={'model_path': 'of an earlier run'}", -30),
        ("server_args={'model_path': 'x'}", 14),
        ("Init torch distributed begin.", 22),
        ("Init torch distributed ends. elapsed=0.1 s", 23),
        ("Load weight begin. avail mem=70 GB", 23),
        ("Load weight end. elapsed=2 s", 25),
        ("KV Cache is allocated.", 26),
        ("Capture cuda graph begin. This can take up to several minutes.", 27),
        ("Capture cuda graph end. Time elapsed: 3 s.", 30),
        ("Capture cuda graph end. Time elapsed: 8 s.", 38),
    ]
    (tmp_path / "rollout-0-engine.log").write_text("no stamp\n" + "".join(engine_line(*one) for one in engine))
    reached = milestones(tmp_path, START, 0.0)
    assert reached["engine and trainer"] == 50 and reached["first tokens"] == 55 and reached["engine: graphs"] == 38
    found = phases(reached)
    assert found["launcher's imports and checks"] == 2 and found["rollout service's imports"] == 2.5
    assert found["engine: scheduler's imports"] == 8 and found["engine: CUDA graphs, kernels"] == 11
    assert (found["trainer: imports"], found["trainer: model"]) == (16.5, 30)
    assert (found["first push"], found["first tokens"]) == (2, 3)


def test_an_engine_without_graphs_and_a_run_that_has_only_begun_have_fewer_phases(tmp_path: Path) -> None:
    (tmp_path / "rollout-0.log").write_text(line("engine_ready", 30))
    (tmp_path / "rollout-0-engine.log").write_text(engine_line("Load weight end.", 25))
    assert phases(milestones(tmp_path, START, 0.0)) == {"engine: cache, backends": 5}
    assert phases(milestones(tmp_path / "none", START, 0.0)) == {}


def test_kernels_are_those_that_a_run_has_made(tmp_path: Path) -> None:
    made = tmp_path / "kernels" / "triton" / "one"
    made.mkdir(parents=True)
    (made / "kernel").touch()
    began = (made / "kernel").stat().st_mtime - 5
    assert kernels(tmp_path, began) == {"triton": {"files": 1, "first": 5.0, "last": 5.0}}
    assert kernels(tmp_path, began + 60) == {}


def test_the_table_has_a_column_for_each_run() -> None:
    rows = [{"caches": "empty", "seconds": 50.0, "phases": {"first push": 1.0}}, {"caches": "kept", "seconds": None, "phases": {}}]
    text = table({"runs": rows, "gpu": "", "cores": 2, "at": "2026-11-25T16:00:00"})
    assert "| first push | 1.0 |  |" in text and "| **until the first tokens** | **50.0** | — |" in text and "no GPU, 2 cores" in text


@tables.table(("log", "event"), [(log, event) for log, events in EVENTS.items() for event in events])
def test_every_event_is_one_that_the_code_logs(log: str, event: str) -> None:
    root = Path(__file__).parents[3]
    places = {"launcher.log": "myxo/launch", "rollout-0.log": "services/rollout", "trainer-0.log": "services/trainer"}
    assert any(f'"{event}"' in path.read_text() for path in (root / places[log]).rglob("*.py"))
