"""The supervisor with real processes: kill -9, restarts, exit codes, what a dead service leaves running, what a finished run waits for."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nats.errors
import pytest
from nats.js.api import RawStreamMsg
from rich.console import Console

from myxo.launch import supervisor as supervisor_module
from myxo.launch.launcher import MARGIN_SECONDS, FinalWeights
from myxo.launch.node_launch import NodeLaunch
from myxo.launch.service_plan import ServiceSpec
from myxo.launch.supervisor import BackOff, FrozenServices, StopReason, Supervisor
from myxo.run.run_access import GivenServers
from myxo.run.run_directory import RunDirectory
from services.rollout import engine_nodes
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import ENGINE_NODE, NODE
from shared.bus.subjects import Subjects
from shared.config.run_config import RunConfig
from shared.config.service_sections import BusSection
from shared.model.final_exports import MARK, final_exports
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import EmbeddedNats
from shared.runtime import exit_codes
from shared.runtime.tasks import cancelled
from shared.schema.ledger import BatchTrained
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.store.payload_store import Store
from shared.view.run_view import RESTARTED
from tests.integration.myxo.command import wait_for
from tests.support.run_config import run_config
from tests.support.waiting import until

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
BRIEF = "import time; time.sleep(0.2); raise SystemExit('no such GPU')"
GRANDCHILD = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)"
)


def quick() -> BackOff:
    return BackOff(first=0.05, longest=0.2, most=4)


def spec(code: str, instance: str = "trainer-0") -> ServiceSpec:
    return ServiceSpec(instance.split("-")[0], instance, (sys.executable, "-c", code))


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    """Makes supervisors; what they started is killed when the test ends."""
    made: list[Supervisor] = []

    def make(*specs: ServiceSpec, **options: object) -> Supervisor:
        supervisor = Supervisor(specs, lambda instance: tmp_path / f"{instance}.log", backoff=quick, **options)  # type: ignore[arg-type]
        made.append(supervisor)
        return supervisor

    yield make
    for supervisor in made:
        supervisor.kill()


def ticks_until(supervisor: Supervisor, condition: Callable[[], object]) -> StopReason | None:
    """Ticks until the condition holds or there is a verdict."""
    verdict: list[StopReason] = []

    def look() -> bool:
        found = supervisor.tick(time.monotonic())
        if found:
            verdict.append(found)
        return bool(found or condition())

    wait_for("the condition or a verdict", look)
    return verdict[0] if verdict else None


@pytest.mark.extra
async def test_restarts_on_a_further_node_are_published(
    supervise: Callable[..., Supervisor], bus: Bus, store: Store, nats: EmbeddedNats, run_name: str, tmp_path: Path
) -> None:
    """Deaths while the store is away are excused there, as on the first node."""
    config = run_config(tmp_path, run={"name": run_name})
    await runs.create(bus, config, None)
    supervisor = supervise(spec(BRIEF, "trainer-node-1"))
    assert ticks_until(supervisor, lambda: supervisor.restarted) is None
    launch = NodeLaunch(config, RunDirectory(config.run.root), GivenServers(nats.url, "redis://127.0.0.1:1"), 1, Console())
    await launch._look(bus, store, supervisor)
    assert supervisor.restarted == [] and launch._away < 0
    async with contextlib.aclosing(Store("redis://127.0.0.1:1")) as away:
        await launch._look(bus, away, supervisor)
    assert (launch._phase, launch._steps) == (runs.RUNNING, 0) and launch._away > 0
    names = Subjects(run_name)
    told = await bus.js.get_last_msg(names.events_stream, names.event("service", RESTARTED))
    assert ServiceEvent.decode(told.data or b"").instance == "trainer-node-1"


async def test_a_further_node_starts_again_what_writes_the_final_weights(
    supervise: Callable[..., Supervisor], bus: Bus, store: Store, nats: EmbeddedNats, run_name: str, tmp_path: Path
) -> None:
    """It leaves once its part of the trainer has left in order; its part of an engine, which ends with the run, is not started again."""
    config = run_config(tmp_path, run={"name": run_name}, trainer={"save_final_hf": True})
    await runs.create(bus, config, None)
    await runs.set_phase(bus, run_name, runs.FINISHED)
    once = (
        f"import pathlib\npath = pathlib.Path({str(tmp_path / 'died')!r})\nif not path.exists():\n    path.touch()\n    raise SystemExit(1)"
    )
    parts = [(NODE, "trainer-node-1", once), (ENGINE_NODE, "rollout-0-node-1", "")]
    supervisor = supervise(*(ServiceSpec(kind, name, (sys.executable, "-c", code)) for kind, name, code in parts))
    launch = NodeLaunch(config, RunDirectory(config.run.root), GivenServers(nats.url, "redis://127.0.0.1:1"), 1, Console())
    async with asyncio.timeout(60):
        assert await launch._until_end(bus, store, supervisor) is None
    assert restarts(supervisor) == {"trainer-node-1": 1, "rollout-0-node-1": 0} and supervisor.trainers_left()


async def test_a_further_node_of_an_engine_stays_while_a_trainer_on_its_gpus_owes_the_final_weights(
    bus: Bus, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_nodes, "PHASE_SECONDS", 0.01)
    config = run_config(tmp_path, run={"name": run_name}, trainer={"save_final_hf": True, "colocate": True})
    looks, missing = 0, engine_nodes.missing_exports

    def looked(asked: RunConfig) -> list[Path]:
        nonlocal looks
        looks += 1
        return missing(asked)

    monkeypatch.setattr(engine_nodes, "missing_exports", looked)
    await runs.create(bus, config, None)
    await runs.set_phase(bus, run_name, runs.FINISHED)
    service: Any = SimpleNamespace(bus=bus, run=run_name, config=config, stopping=asyncio.Event())
    ending = asyncio.create_task(engine_nodes._end_with_run(service))
    await until(lambda: looks > 3, "several looks")
    assert not service.stopping.is_set()
    for path in final_exports(config):
        path.mkdir(parents=True)
        (path / MARK).write_text(json.dumps({"steps": config.rollout.num_rollout}))
    await asyncio.wait_for(service.stopping.wait(), 60)
    await cancelled([ending])


async def test_a_record_is_read_once_the_server_answers(bus: Bus, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await runs.create(bus, run_config(tmp_path, run={"name": run_name}), None)
    read, errors = bus.js.get_last_msg, [nats.errors.NoRespondersError(), nats.errors.TimeoutError()]

    async def at_last(stream: str, subject: str) -> RawStreamMsg:
        if errors:
            raise errors.pop()
        return await read(stream, subject)

    monkeypatch.setattr(bus.js, "get_last_msg", at_last)
    assert await runs.last_record(bus, run_name, BatchTrained) is None and not errors


def restarts(supervisor: Supervisor) -> dict[str, int]:
    return {status.instance: status.restarts for status in supervisor.statuses(time.monotonic())}


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def card(instance: str, state: str = "ready", at: float | None = None) -> ServiceStatus:
    at = time.time() if at is None else at
    return ServiceStatus(service=instance.split("-")[0], instance=instance, host="h", pid=0, http="", state=state, at=at)


def test_a_service_that_is_killed_comes_back(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = supervise(spec(SLEEP), spec(SLEEP, "buffer-0"))
    victim, bystander = (status.pid for status in supervisor.statuses(time.monotonic()))
    log = tmp_path / "trainer-0.log"
    wait_for("the first life's output", lambda: "up" in log.read_text())
    os.kill(victim, signal.SIGKILL)
    assert ticks_until(supervisor, lambda: supervisor.restarted) is None
    assert [(event.instance, event.what, event.detail) for event in supervisor.restarted] == [("trainer-0", "restarted", "after signal 9")]
    assert restarts(supervisor) == {"trainer-0": 1, "buffer-0": 0}
    trainer, buffer = supervisor.statuses(time.monotonic())
    assert trainer.pid != victim
    assert alive(trainer.pid)
    assert buffer.pid == bystander
    wait_for("both lives' output", lambda: log.read_text().count("up") == 2)


def test_a_server_of_the_users_comes_back_and_takes_its_children_with_it(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    """It publishes no status: having lived for long is all that can be known of it."""
    own = ServiceSpec("agents", "agents-0", (sys.executable, "-c", GRANDCHILD), foreign=True)
    supervisor = supervise(own)
    log = tmp_path / "agents-0.log"
    for life in range(1, 7):  # more than a service that never gets to work may end
        wait_for("its child", lambda life=life: log.read_text().count("\n") == life)
        (status,) = supervisor.statuses(time.monotonic())
        assert (status.foreign, status.restarts) == (True, life - 1)
        os.kill(status.pid, signal.SIGKILL)
        wait_for("its next life", lambda life=life: supervisor.tick(time.monotonic() + 100) or restarts(supervisor) == {"agents-0": life})
    children = [int(pid) for pid in log.read_text().split()][:-1]
    wait_for("the end of all children", lambda: not any(map(alive, children)))


def test_of_a_finished_run_a_trainer_that_dies_comes_back_until_it_leaves(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    died = f"path = pathlib.Path({str(tmp_path / 'died')!r})"
    once = f"import os, pathlib\n{died}\nif path.exists(): raise SystemExit(0)\npath.touch()\nos.kill(os.getpid(), 9)"
    supervisor = supervise(spec(once), spec(SLEEP, "buffer-0"))
    assert not supervisor.trainers_left()
    wait_for("its second life's end", lambda: supervisor.tick(time.monotonic(), finished=True) or supervisor.trainers_left())
    for _ in range(3):
        assert supervisor.tick(time.monotonic() + 100, finished=True) is None
    assert restarts(supervisor) == {"trainer-0": 1, "buffer-0": 0}
    wait_for("a third", lambda: supervisor.tick(time.monotonic() + 100) or restarts(supervisor)["trainer-0"] == 2)  # of one that is not


ANOTHER_ERROR = "import random; raise SystemExit(''.join(random.choices('ghijklmnop', k=12)))"
"""A service that dies of something else each time."""


def test_a_hopeless_service_is_given_up_with_its_last_words(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    supervisor = supervise(spec(ANOTHER_ERROR))
    verdict = ticks_until(supervisor, lambda: False)
    assert verdict is not None
    assert verdict == StopReason("trainer-0", False, 4, verdict.lines, tmp_path / "trainer-0.log")
    assert verdict.reason == "trainer-0 ended 4 times in a row without getting to work"
    assert len(verdict.lines) == 1


def test_a_service_that_dies_three_times_of_the_same_is_given_up(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    """Although each life was ready: numbers in the error differ, the error does not."""
    code = f"import pathlib, sys, time\nwhile not pathlib.Path({str(tmp_path)!r}, 'go').exists(): time.sleep(0.01)\n"
    supervisor = supervise(spec(code + "sys.exit(f'no GPU {time.time()}')"))
    (tmp_path / "go").touch()
    verdict: StopReason | None = None

    def look() -> bool:
        nonlocal verdict
        supervisor.note_ready([card("trainer-0")])
        verdict = supervisor.tick(time.monotonic(), steps=7)
        return verdict is not None

    wait_for("the verdict", look)
    assert verdict is not None and verdict.deaths == 3
    assert "trainer-0 ended 3 times with the same error, and no training step in between: exit code 1: no GPU" in verdict.reason
    assert len(supervisor.restarted) == 2
    assert all(event.detail.startswith("after exit code 1: no GPU") for event in supervisor.restarted)


def test_a_store_that_is_full_is_no_excuse_for_a_service_that_never_gets_to_work(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec(BRIEF), excused=lambda since: True, away=lambda since: False)
    wait_for("it is given up", lambda: supervisor.tick(time.monotonic()) is not None)


def test_the_same_death_is_forgiven_where_steps_are_trained_in_between_or_the_bus_was_away(supervise: Callable[..., Supervisor]) -> None:
    progressing, excused = supervise(spec(BRIEF)), supervise(spec(BRIEF, "buffer-0"), excused=lambda since: True)
    steps = 0

    def look() -> bool:
        nonlocal steps
        steps += 1
        progressing.note_ready([card("trainer-0")])
        assert progressing.tick(time.monotonic(), steps) is None
        assert excused.tick(time.monotonic()) is None
        return min(*restarts(progressing).values(), *restarts(excused).values()) >= 4

    wait_for("four restarts of both", look)


def test_a_service_that_was_ready_is_not_given_up(supervise: Callable[..., Supervisor]) -> None:
    """Four deaths are the limit here, but each life said that it was ready."""
    supervisor = supervise(spec(SLEEP))
    for life in range(1, 7):
        supervisor.note_ready([card("trainer-0")])
        os.kill(supervisor.statuses(time.monotonic())[0].pid, signal.SIGKILL)
        assert ticks_until(supervisor, lambda life=life: restarts(supervisor)["trainer-0"] == life) is None


def test_a_card_of_the_life_before_does_not_count(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec(SLEEP))
    for state, at in (("ready", time.time() - 60), ("starting", time.time()), ("warm start", time.time())):
        supervisor.note_ready([card("trainer-0", state, at)])
        assert not supervisor.statuses(time.monotonic())[0].ready
    supervisor.note_ready([card("trainer-0", "fenced")])
    assert supervisor.statuses(time.monotonic())[0].ready


def test_bad_input_ends_the_run(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    code = "import sys; print('a line', flush=True); print('trainer: x = 1: give 2', file=sys.stderr); raise SystemExit(2)"
    supervisor = supervise(spec(code), spec(SLEEP, "buffer-0"))
    verdict = ticks_until(supervisor, lambda: False)
    assert verdict == StopReason("trainer-0", True, 1, ["trainer: x = 1: give 2"], tmp_path / "trainer-0.log")
    assert supervisor.running("buffer")


def test_an_exit_with_2_while_the_bus_was_away_is_a_death_like_any_other(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec("raise SystemExit(2)"), excused=lambda since: True)
    assert ticks_until(supervisor, lambda: restarts(supervisor)["trainer-0"] == 2) is None


def test_a_clean_exit_before_the_end_is_a_death_too(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec("pass"))
    assert ticks_until(supervisor, lambda: restarts(supervisor)["trainer-0"] == 1) is None


def test_who_does_not_stop_is_killed_with_all_it_started(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{GRANDCHILD}"
    supervisor = supervise(spec(stubborn), spec(SLEEP, "buffer-0"))
    log = tmp_path / "trainer-0.log"
    wait_for("the grandchild", lambda: log.read_text().strip())
    wait_for("the buffer", lambda: (tmp_path / "buffer-0.log").read_text().strip())
    supervisor.terminate()
    wait_for("the buffer's end", lambda: not supervisor.running("buffer"))
    assert supervisor.running("trainer")
    assert supervisor.kill() == ["trainer-0"]
    assert not supervisor.running()
    wait_for("the grandchild's end", lambda: not alive(int(log.read_text())))


def test_last_words_are_of_this_life(tmp_path: Path) -> None:
    log = tmp_path / "trainer-0.log"
    log.write_text("a life before\n")
    child = ChildProcess("trainer-0", [sys.executable, "-c", "print('one\\n\\ntwo\\nthree')"], log)
    wait_for("its end", lambda: child.exit_code() is not None)
    assert child.exit_code() == 0
    assert child.last_lines(2) == ["two", "three"]
    assert child.last_lines(10) == ["one", "two", "three"]


def test_a_process_that_a_signal_has_stopped_is_frozen_although_a_child_of_its_own_is_heard(supervise: Callable[..., Supervisor]) -> None:
    supervisor = supervise(spec(SLEEP), spec(SLEEP, "reward-0"))
    frozen = FrozenServices(BusSection(frozen_timeout=1.0, registry_ttl=1.0))
    stopped, other = supervisor.statuses(time.monotonic())
    os.kill(stopped.pid, signal.SIGSTOP)

    def again() -> bool:
        supervisor.tick(time.monotonic())
        told = {"host": "h", "pid": 1, "http": "", "state": "ready", "at": time.time()}
        frozen.listen(supervisor, [ServiceStatus(service=of, instance=f"{of}-0", **told) for of in ("trainer", "reward")])
        return supervisor.statuses(time.monotonic())[0].restarts == 1

    wait_for("the stopped process to be started again", again)
    trainer, reward = supervisor.statuses(time.monotonic())
    assert trainer.last_error == "it was frozen, stopped by a signal for 1 s, and was killed" and trainer.pid != stopped.pid
    assert (reward.restarts, reward.pid) == (0, other.pid)


def test_no_service_is_frozen_between_two_of_its_heartbeats(supervise: Callable[..., Supervisor], monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor, killed = supervise(spec(SLEEP)), list[float]()
    frozen = FrozenServices(BusSection(frozen_timeout=60, registry_ttl=400))  # a status is renewed every 80 s
    told = ServiceStatus(service="trainer", instance="trainer-0", host="h", pid=1, http="", state="ready", at=time.time())
    clock = SimpleNamespace(monotonic=lambda: now, time=time.time)
    monkeypatch.setattr(supervisor, "kill_frozen", lambda *_: killed.append(now))
    monkeypatch.setattr(supervisor_module, "time", clock)
    for now in range(0, 500, 2):  # noqa: B007, as the clock has it
        frozen.listen(supervisor, [told])
    assert killed == [402]


def test_a_frozen_service_is_killed_with_all_it_started(supervise: Callable[..., Supervisor], tmp_path: Path) -> None:
    """SIGSTOP leaves a process that is alive and does nothing; its child must not outlive it either."""
    supervisor = supervise(spec(GRANDCHILD))
    log = tmp_path / "trainer-0.log"
    wait_for("the child", lambda: log.exists() and log.read_text().strip())
    child, pid = int(log.read_text().split()[0]), supervisor.statuses(time.monotonic())[0].pid
    os.kill(pid, signal.SIGSTOP)
    supervisor.kill_frozen("trainer-0", "it was frozen, without a heartbeat for 60 s, and was killed")
    ticks_until(supervisor, lambda: supervisor.statuses(time.monotonic())[0].restarts == 1)
    status = supervisor.statuses(time.monotonic())[0]
    assert status.last_error == "it was frozen, without a heartbeat for 60 s, and was killed" and status.pid != pid
    assert supervisor.restarted[0].detail == f"after {status.last_error}"
    wait_for(
        "the child's end",
        lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][:4],
    )


STEPS, PATIENCE = 6, 20.0


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """Of a run whose last checkpoint is on disk."""
    config = run_config(tmp_path, rollout={"num_rollout": STEPS}, trainer={"collective_timeout": PATIENCE})
    checkpoint = config.trained / "checkpoints" / f"step_{STEPS:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").write_text("{}")
    return config


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    made = Supervisor([spec(SLEEP), spec(SLEEP, "buffer-0")], lambda name: tmp_path / f"{name}.log", backoff=lambda: BackOff(first=0.05))
    yield made
    made.kill()


def written(config: RunConfig) -> None:
    (config.trained / "hf").mkdir()
    (config.trained / "hf" / MARK).write_text(json.dumps({"steps": STEPS}))


def test_they_are_owed_until_they_are_there(config: RunConfig, supervisor: Supervisor, capsys: pytest.CaptureFixture[str]) -> None:
    weights, now = FinalWeights(config), time.monotonic()
    assert weights.wait is None
    assert weights.owed(supervisor, now)
    assert weights.wait is not None and weights.wait.what == f"the final weights in {config.trained / 'hf'}"
    assert weights.verdict(0) == exit_codes.RUN_FAILED
    assert f"its final weights in {config.trained / 'hf'} are not there" in capsys.readouterr().err
    written(config)
    assert not weights.owed(supervisor, now + 1)
    assert (weights.wait, weights.verdict(0), weights.announced()) == (None, 0, "")


def test_a_new_life_of_the_trainer_has_its_time_anew(config: RunConfig, supervisor: Supervisor) -> None:
    weights, patience = FinalWeights(config), PATIENCE + MARGIN_SECONDS
    [began] = [time.monotonic() - item.lived for item in supervisor.statuses(time.monotonic()) if item.service == "trainer"]
    assert weights.owed(supervisor, began + 1)
    assert weights.owed(supervisor, began + 0.9 * patience)
    assert not weights.owed(supervisor, began + 1.1 * patience)
    supervisor.kill()
    wait_for("its next life", lambda: supervisor.tick(time.monotonic(), finished=True) or supervisor.restarted)
    [life] = [item.lived for item in supervisor.statuses(time.monotonic()) if item.service == "trainer"]
    assert weights.owed(supervisor, time.monotonic() - life + 0.9 * patience)


def test_nothing_is_waited_for_that_nobody_could_write(config: RunConfig, supervisor: Supervisor) -> None:
    (config.trained / "checkpoints" / f"step_{STEPS:08d}" / "checkpoint.json").unlink()
    weights = FinalWeights(config)
    assert not weights.owed(supervisor, time.monotonic())
    assert (weights.announced(), weights.verdict(0)) == ("", 0)
