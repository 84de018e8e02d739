"""Reading the services' logs: the end of long files, merged by time, with levels, as they grow."""

import io
import json
import os
import time
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from myxo.commands import logs
from myxo.commands.logs import Tail, belongs, chosen, parse, reaches
from myxo.run import run_directory
from myxo.run.run_directory import RunDirectory
from shared.runtime.errors import ConfigError


def entry(second: int, event: str, level: str = "info", **fields: object) -> str:
    return json.dumps({"event": event, "level": level, "timestamp": f"2026-01-01T00:00:{second:02d}.000000Z", "run": "r", **fields})


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "tiny" / "logs"
    directory.mkdir(parents=True)
    (directory / "buffer-0.log").write_text("\n".join([entry(1, "one"), entry(4, "four", "warning")]) + "\n")
    (directory / "rollout-0.log").write_text("\n".join([entry(2, "two"), "plain words", entry(5, "five", "error")]) + "\n")
    (directory / "rollout-0-engine.log").write_text("no json at all\n")
    return tmp_path / "runs"


def printed(run: Path, *, name: str = "tiny", service: str | None = None, count: int = 50, level: str = "debug") -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=200)
    wanted = Namespace(run=name, dir=run, follow=False, service=service, lines=count, level=level)
    assert logs.logs(wanted, console) == 0
    return out.getvalue().splitlines()


def test_lines_of_all_services_are_merged_by_time(run: Path) -> None:
    words = [line.split()[-1] for line in printed(run)]
    assert words == ["all", "one", "two", "words", "four", "five"]


def test_the_last_n(run: Path) -> None:
    assert [line.split()[-1] for line in printed(run, count=2)] == ["four", "five"]
    assert printed(run, count=0) == []


def test_a_level_and_above(run: Path) -> None:
    assert [line.split()[-1] for line in printed(run, level="warning")] == ["four", "five"]


@pytest.mark.parametrize(("service", "first"), [("rollout", "all"), ("rollout-0", "all"), ("buffer", "one"), ("buffer-0", "one")])
def test_one_service(run: Path, service: str, first: str) -> None:
    assert printed(run, service=service)[0].split()[-1] == first


def test_an_unknown_service_is_refused_with_the_nearest(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"--service = 'rolout'.* did you mean rollout"):
        printed(run, service="rolout")


def test_an_unknown_run_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean tiny"):
        printed(run, name="tini")


def test_fields_and_exceptions_are_shown(run: Path) -> None:
    (run / "tiny" / "logs" / "trainer-0.log").write_text(entry(6, "failed", "error", step=3, exception="Traceback\nBoom") + "\n")
    assert printed(run, service="trainer")[0].endswith("failed step=3")
    assert printed(run, service="trainer")[1:] == ["Traceback", "Boom"]


def test_an_engines_own_times_are_local(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        (run / "tiny" / "logs" / "rollout-0-engine.log").write_text("[2025-12-31 19:00:03] three\nmore of three\n")
        assert [line.split()[-1] for line in printed(run)] == ["one", "two", "words", "three", "three", "four", "five"]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_text_in_brackets_is_no_markup(run: Path) -> None:
    (run / "tiny" / "logs" / "trainer-0.log").write_text("[bold]not bold[/bold] [2026-01-01] x\n")
    assert printed(run, service="trainer")[0].endswith("[bold]not bold[/bold] [2026-01-01] x")


def test_rotated_logs_are_bounded_and_read_as_one(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, log = RunDirectory(run / "tiny"), run / "tiny" / "logs" / "trainer-0.log"
    with log.open("a", buffering=1) as held:  # as a process has it
        held.write(entry(6, "older") + "\n")
        monkeypatch.setattr(run_directory, "LOG_BYTES", 10)
        directory.rotate_logs()
        os.utime(log.parent / "older" / log.name, (datetime(2026, 1, 1, 0, 0, 6, 500_000, UTC).timestamp(),) * 2)
        held.write("plain\n" + entry(7, "newer") + "\n")
    assert log.stat().st_size < 200 and [line.split()[-1] for line in printed(run, service="trainer")] == ["older", "plain", "newer"]
    monkeypatch.setattr(run_directory, "LOG_BYTES", 1000)
    directory.rotate_logs()
    assert log.stat().st_size > 0, "a small log stays"
    assert [line.split()[-1] for line in printed(run)][:2] == ["all", "one"] and len(printed(run)) == 9


def test_what_came_before_a_rotation_is_followed_and_older_lines_are_not_printed_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, log, pauses = RunDirectory(run / "tiny"), run / "tiny" / "logs" / "trainer-0.log", iter(range(2))
    monkeypatch.setattr(run_directory, "LOG_BYTES", 10)
    log.write_text(entry(8, "rotated" * 20) + "\n")
    directory.rotate_logs()
    log.write_text(entry(9, "known" * 100) + "\n")

    def pause(_: float) -> None:
        if (number := next(pauses, None)) is None:
            raise KeyboardInterrupt
        with log.open("a", buffering=1) as held:
            held.write(entry(10 + number, f"before-{number}") + "\n")
            directory.rotate_logs()
            held.write(entry(20 + number, "ab"[number] * (300 - 200 * number)) + "\n")

    monkeypatch.setattr(logs.time, "sleep", pause)
    out = io.StringIO()
    wanted = Namespace(run="tiny", dir=run, follow=True, service="trainer", lines=0, level="debug")
    with pytest.raises(KeyboardInterrupt):
        logs.logs(wanted, Console(file=out, width=2000))
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["before-0", "a" * 300, "before-1", "b" * 100]


def test_a_growing_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "trainer-0.log"
    path.write_text(entry(1, "one") + "\n" + '{"event": "tw')
    tail = Tail(path)
    assert [line.fields["event"] for line in tail.last(10, "debug") if line.fields] == ["one"]
    assert tail.more() == []
    with path.open("a") as file:
        file.write('o", "timestamp": "2026-01-01T00:00:02Z"}\nplain\nhalf')
    two, plain = tail.more()
    assert two.fields is not None
    assert two.fields["event"] == "two"
    assert (plain.text, plain.at) == ("plain", "2026-01-01T00:00:02Z")
    path.write_text(entry(9, "anew") + "\n")
    assert [line.fields["event"] for line in tail.more() if line.fields] == ["anew"]


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(logs.LEVELS), st.booleans(), st.integers(0, 300)), max_size=40),
    st.integers(1, 50),
    st.sampled_from(logs.LEVELS),
)
def test_the_end_of_a_file_read_backwards_is_the_end_of_it_read_forwards(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, bool, int]], count: int, level: str
) -> None:
    texts = [entry(place % 60, f"é{'x' * size}", name) if is_json else f"text {place}" for place, (name, is_json, size) in enumerate(rows)]
    path = tmp_path_factory.mktemp("logs") / "a-0.log"
    path.write_text("".join(text + "\n" for text in texts))
    expected, at = [], ""
    for text in texts:
        line = parse("a-0", text, at)
        at = line.at
        expected.append(line)
    expected = [line for line in expected if reaches(line, level)][-count:]
    assert [line.text for line in Tail(path).last(count, level)] == [line.text for line in expected]


def test_names(tmp_path: Path) -> None:
    assert belongs("rollout-0", "rollout")
    assert belongs("rollout-0-engine", "rollout-0")
    assert not belongs("rollout-10", "rollout-1")
    with pytest.raises(ConfigError, match="there are no logs"):
        chosen(tmp_path, "buffer")
