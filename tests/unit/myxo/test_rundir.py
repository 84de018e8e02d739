"""A run's directory: its lock, its servers file, what --fresh removes and what it leaves alone."""

import asyncio
import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from myxo.commands import console
from myxo.commands.up import claimed
from myxo.main import main
from myxo.run.run_directory import STATE, RunDirectory, RunHeld, ServerUrls, find, no_such_run
from services.console.run_histories import runs_beside
from shared.runtime import exit_codes
from shared.runtime.errors import ConfigError
from tests.support.run_config import run_config

HOLD = """
import sys, pathlib
from myxo.run.run_directory import RunDirectory
directory = RunDirectory(pathlib.Path(sys.argv[1]))
with directory.held():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path):
    """A process of its own that holds tmp_path/run."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_clear_removes_the_state_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "run"
    for name in STATE:
        (root / name).mkdir(parents=True)
        (root / name / "content").write_text("x")
    (root / "summary.json").rename(root / "unused")
    (root / "summary.json").write_text("{}")
    for name in ("model", "data"):
        (root / name).mkdir()
        (root / name / "precious").write_text("keep")
    (root / "notes.txt").write_text("keep")
    RunDirectory(root).clear()
    assert sorted(path.name for path in root.iterdir()) == ["data", "model", "notes.txt", "unused"]
    assert (root / "model" / "precious").read_text() == "keep"


def test_all_that_services_write_is_state() -> None:
    lines = [line for path in (Path(__file__).parents[3] / "services").rglob("*.py") for line in path.read_text().splitlines()]
    named = [line.replace("{role}", "critic") for line in lines if re.search(r"config\.(trained|run\.root) / ", line)]
    written = {name for line in named for name in re.findall(r'"([a-z][\w.-]+)"', line)} - {"actor", "critic"}
    assert {"critic-checkpoints", "wandb-critic.jsonl", "tensorboard"} <= written
    within = {"recorded.json", "train-config.json", "sampler_weights"}
    assert written | {"weights", "evaluations", "prompts", "hf"} <= {*STATE, *within}


def test_a_run_that_begins_anew_has_no_older_snapshots(tmp_path: Path) -> None:
    config = run_config(tmp_path, weights={"update_weight_disk_dir": str(tmp_path / "shared")})
    for name in ("test/v000040", "test/.current", "test/notes", "other/v000001"):
        (tmp_path / "shared" / name).mkdir(parents=True)
    for fresh, left in ((False, 3), (True, 1)):
        with claimed(config, RunDirectory(config.run.root), fresh=fresh):
            assert len(list((tmp_path / "shared" / "test").iterdir())) == left
    assert (tmp_path / "shared" / "test" / "notes").is_dir() and (tmp_path / "shared" / "other" / "v000001").is_dir()


def test_clear_does_not_follow_links(tmp_path: Path) -> None:
    elsewhere = tmp_path / "big-disk"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("keep")
    root = tmp_path / "run"
    root.mkdir()
    (root / "checkpoints").symlink_to(elsewhere)
    RunDirectory(root).clear()
    assert not (root / "checkpoints").is_symlink()
    assert (elsewhere / "precious").read_text() == "keep"


def test_clear_of_nothing_is_fine(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "run").clear()


def test_input_inside_the_state_is_not_cleared_away(tmp_path: Path) -> None:
    config = run_config(tmp_path, model={"hf_checkpoint": str(tmp_path / "runs" / "test" / "hf")})
    with pytest.raises(ConfigError, match=r"model\.hf_checkpoint = .* --fresh removes"):
        RunDirectory(config.run.root).refuse_input_in_state(config)


def test_input_beside_the_state_is_fine(tmp_path: Path) -> None:
    config = run_config(tmp_path, model={"hf_checkpoint": str(tmp_path / "runs" / "test" / "model")})
    RunDirectory(config.run.root).refuse_input_in_state(config)


def test_two_holders_refuse_each_other(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.is_held()
    with pytest.raises(RunHeld, match=f"in use by process {holder.pid}"), directory.held():
        pass
    holder.kill()
    holder.wait()
    assert not directory.is_held()
    with directory.held():
        pass


def test_who_may_only_read_a_run_sees_it_held(tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `run.dir_mode = 750` has it: the lock is the owner's to write, and the servers' addresses the owner's alone."""
    directory, opened = RunDirectory(tmp_path / "run"), Path.open

    def refused(path: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if mode != "r" or path.name == "servers.json":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, mode, *given, **named)

    monkeypatch.setattr(Path, "open", refused)
    monkeypatch.setattr(Path, "read_text", lambda path, *given: refused(path).read())
    assert directory.is_held() and directory.servers() is None
    with pytest.raises(RunHeld, match="another user's live run: reach it as that user, or by NATS_URL"), directory.held():
        pass


def test_a_file_system_without_locks_is_not_taken_for_a_run_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    directory = RunDirectory(tmp_path / "run")
    with pytest.raises(ConfigError, match="run.dir = .* cannot be locked: No locks available"), directory.held():
        pass
    assert (directory.root / "lock").is_file() and not directory.is_held()


@pytest.fixture
def another_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run's directory of mode 700 that is somebody else's, beside a run that is not."""
    theirs, stat, opened = tmp_path / "theirs", os.stat, Path.open
    for root in (theirs, tmp_path / "mine"):
        (root / "logs").mkdir(parents=True)
        for name in ("config.json", "lock"):
            (root / name).write_text("{}")

    def refused(path: Any) -> None:
        if Path(path).parent == theirs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", lambda path, **named: (refused(path), stat(path, **named))[1])
    monkeypatch.setattr(Path, "open", lambda path, *given, **named: (refused(path), opened(path, *given, **named))[1])
    return theirs


def test_a_run_of_another_users_is_none_of_this_ones(another_users: Path) -> None:
    runs = another_users.parent
    assert find("theirs", runs) == ("theirs", None) and "did you mean mine?" in str(no_such_run("mina", runs))
    assert not RunDirectory(another_users).is_held() and runs_beside(runs / "mine") == []
    assert runs_beside(another_users) == ["mine"] and runs_beside(runs / "none" / "at-all") == []


def test_what_this_user_may_not_read_is_one_line(another_users: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(another_users)]) == exit_codes.BAD_INPUT
    assert exit_codes.ended("myxo", (another_users / "lock").read_text) == exit_codes.BAD_INPUT  # type: ignore[arg-type]
    assert f"Permission denied: '{another_users / 'lock'}'; let this user in" in capsys.readouterr().err


def test_looking_at_the_lock_does_not_take_it(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert not directory.is_held()
    with directory.held():
        pass
    assert not directory.is_held()


def test_servers_are_for_the_owner_and_only_while_held(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    directory = RunDirectory(tmp_path / "run")
    assert directory.servers() is None
    directory.write_servers(ServerUrls("nats://secret@host:1", "unix:///x", holder.pid))
    path = tmp_path / "run" / "servers.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert directory.servers() == ServerUrls("nats://secret@host:1", "unix:///x", holder.pid)
    holder.kill()
    holder.wait()
    assert directory.servers() is None, "what a killed launcher left behind is no live run"
    directory.remove_servers()
    assert not path.exists()


def test_servers_file_replaces_an_older_one_that_anybody_could_read(tmp_path: Path) -> None:
    root = tmp_path / "run"
    root.mkdir()
    (root / "servers.json").write_text("{}")
    os.chmod(root / "servers.json", 0o644)
    RunDirectory(root).write_servers(ServerUrls("a", "b", 1))
    assert (root / "servers.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((root / "servers.json").read_text()) == {"nats_url": "a", "redis_url": "b", "pid": 1, "console": ""}


def test_a_run_is_found_by_id_and_by_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs" / "one"
    (root / "logs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for text in ("one", "runs/one", str(root), "runs/one/"):
        name, directory = find(text, Path("runs"))
        assert name == "one"
        assert directory is not None
        assert directory.root.resolve() == root
    assert find("two", Path("runs")) == ("two", None)
    with pytest.raises(ConfigError, match="RUN = 'No Run!'"):
        find("No Run!", Path("runs"))


def test_a_link_of_the_runs_name_to_its_files_is_the_run(tmp_path: Path) -> None:
    config = run_config(tmp_path / "gone", run={"name": "foo", "dir": str(tmp_path / "gone")})
    (tmp_path / "foo-store").mkdir()
    (tmp_path / "foo").symlink_to("foo-store")
    assert RunDirectory(tmp_path / "foo").placed(config).run.root == tmp_path / "foo"
    with pytest.raises(ConfigError, match="holds the files of run foo"):
        RunDirectory(tmp_path / "foo-store").placed(config)


def test_a_console_beside_a_start_waits_for_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, looked = RunDirectory(tmp_path / "run"), list[bool]()
    files.logs.mkdir(parents=True)
    urls = ServerUrls("nats://nowhere", "", 1)

    async def settled(_: RunDirectory) -> ServerUrls:
        looked.append(True)
        return urls

    async def origin() -> None:
        with pytest.raises(LookupError):
            async with console._origin("run", tmp_path):
                pass

    def reach(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(console, "settled", settled)
    monkeypatch.setattr(console, "reach", reach)
    asyncio.run(origin())
    assert looked


def test_a_directory_of_data_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "one" / "model").mkdir(parents=True)
    assert find("one", tmp_path) == ("one", None)


def test_no_such_run_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "arithmetic" / "logs").mkdir(parents=True)
    assert "did you mean arithmetic?" in str(no_such_run("aritmetic", tmp_path))
    assert "there are none yet" in str(no_such_run("x", tmp_path / "absent"))
