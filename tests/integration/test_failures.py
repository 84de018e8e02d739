"""A thread or a task that dies takes its service down, with its error: real processes on real servers."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from services.trainer import control_client
from services.trainer.commands import Leave
from services.trainer.control_client import ControlClient
from services.trainer.step_scheduler import BatchRequester
from shared.bus import runs
from shared.bus.connection import Bus
from shared.bus.registry import Registry
from shared.bus.subjects import Subjects
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.tasks import failures_reported
from shared.schema.messages import EvalFigures, EvaluationsEnded, EvaluationsRequest, Trained
from shared.schema.service_messages import ServiceStatus
from shared.service.service_base import REFUSED_SECONDS
from tests.support.pushing import Replicated
from tests.support.run_config import run_config
from tests.support.valid_messages import example
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

DEATH_SECONDS = 2.0

SERVICE = """
import asyncio, threading, time
from shared.runtime.tasks import SupervisedThread
from shared.service.service_base import run

def dies():
    print("dying", flush=True)
    raise KeyError("what it died of")

async def dies_too():
    dies()

async def stubborn(service):
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            pass

async def body(service):
    service.state = "ready"
    {death}

run("reward", body)
"""

TRAINER = """
import sys, time
from services.trainer import control_client
from services.trainer.commands import Leave
from services.trainer.control_client import ControlClient
from services.trainer.step_scheduler import BatchRequester
from shared.bus.registry import Registry
from shared.service.service_base import exit_code

async def dies(self, service):
    print("dying", flush=True)
    raise KeyError("what it died of")

Registry.alive = dies

def main():
    with ControlClient("{service}"):
        time.sleep(600)  # as a collective whose other ranks are late

sys.exit(exit_code("{service}", main))
"""

DEATHS = {
    "thread": 'SupervisedThread(dies, "worker").start(); await service.stopping.wait()',
    "thread, body stubborn": 'SupervisedThread(dies, "worker").start(); await stubborn(service)',
    "thread, loop blocked": 'SupervisedThread(dies, "worker").start(); time.sleep(600)',
    "background": "async with service.background(dies_too()): await service.stopping.wait()",
    "spawned": "service.spawn(dies_too()); await service.stopping.wait()",
    "spawned, body stubborn": "service.spawn(dies_too()); await stubborn(service)",
}


@pytest.fixture
def environment(
    nats: EmbeddedNats, valkey: EmbeddedValkey, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """A run with an evaluation on the shared servers, and where a service finds it, in this process too."""
    config = run_config(tmp_path, run={"name": run_name}, eval={"eval_prompt_data": str(tmp_path / "heldout.jsonl")})

    async def create() -> None:
        bus = await Bus.connect(nats.url, "test")
        await runs.create(bus, config, valkey.url)
        await bus.close()

    asyncio.run(create())
    addresses = {"NATS_URL": nats.url, "REDIS_URL": valkey.url, "MYXO_RUN": run_name, "MYXO_INSTANCE": "x-0"}
    for name, value in addresses.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **addresses, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def death_of(script: str, environment: dict[str, str]) -> tuple[float, int, list[dict[str, object]]]:
    """Runs a service that dies: seconds from its death to its end, exit code, log lines."""
    process = subprocess.Popen(
        [sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        began = time.monotonic()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert said == "dying\n", err
    return time.monotonic() - began, process.returncode, [json.loads(line) for line in err.splitlines() if line.startswith("{")]


SCRIPTS = {name: SERVICE.format(death=death) for name, death in DEATHS.items()}
SCRIPTS |= {service: TRAINER.format(service=service) for service in ("trainer", "critic")}


KEPT = ("thread, loop blocked", "trainer")


@pytest.mark.parametrize(
    "script", [pytest.param(script, id=name, marks=() if name in KEPT else pytest.mark.extra) for name, script in SCRIPTS.items()]
)
def test_a_thread_or_task_that_dies_ends_its_service(script: str, environment: dict[str, str]) -> None:
    seconds, code, lines = death_of(script, environment)
    assert code == 1
    assert seconds < DEATH_SECONDS
    (died, *_) = [line for line in lines if line["event"] == "died"]
    assert died["error"] == "KeyError: 'what it died of'"
    assert "in dies" in str(died["exception"])


def test_a_service_whose_credentials_are_refused_while_it_works_ends_as_at_its_start(
    environment: dict[str, str],
) -> None:
    refused = 'print("dying", flush=True); await service.bus._on_error(nats.errors.AuthorizationError()); await service.stopping.wait()'
    seconds, code, _ = death_of("import nats.errors" + SERVICE.format(death=refused), environment)
    assert code == 2 and seconds < REFUSED_SECONDS + DEATH_SECONDS


def test_all_ranks_of_a_trainer_end_with_the_one_whose_thread_dies(environment: dict[str, str]) -> None:
    """torchrun would give a rank that is busy half a minute."""
    ranks = 'from services.trainer.torchrun import run_ranks; run_ranks(2, "tests.support.dying_rank")'
    seconds, code, lines = death_of(ranks, environment)
    assert code == 1
    assert seconds < 25, "the ranks end at once; torchrun itself takes seconds on a busy machine"
    assert any(line["event"] == "died" for line in lines)


@pytest.mark.extra
def test_all_ranks_of_a_trainer_end_with_one_that_a_signal_has_stopped(environment: dict[str, str]) -> None:
    """Its process is there, and rank 0's heartbeats continue."""
    ranks = 'lambda: run_ranks(2, "tests.support.dying_rank", "stops")'
    script = "import sys; from services.trainer.torchrun import run_ranks; from shared.service.service_base import exit_code\n"
    seconds, code, lines = death_of(f'{script}sys.exit(exit_code("trainer", {ranks}))', environment)
    assert code == 1
    assert seconds < 60, "ten seconds after it was stopped, where the machine is not busy"
    words = [line["error"] for line in lines if line["event"] == "failed"]
    assert len(words) == 1 and words[0].startswith("rank 1 was frozen: a signal had stopped its process"), lines


class LateFuture(Future[None]):
    """Gives its result to whoever waits as a busy machine does: some time after it was set."""

    def result(self, timeout: float | None = None) -> None:
        super().result(timeout)
        time.sleep(0.05)


@pytest.fixture
def signals() -> Iterator[None]:
    """A control client takes the process's signals; the tests after this one want theirs."""
    handlers = {signal_number: signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signal_number, handler in handlers.items():
        signal.signal(signal_number, handler)


def test_a_trainer_that_is_asked_to_stop_while_the_buffer_is_away_leaves_without_waiting_for_the_buffers_deadline(
    signals: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "STOP_SECONDS", 1.0)
    with Replicated(tmp_path, tmp_path, replicas=0) as run:
        asker = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM))
        asker.start()
        assert BatchRequester(run.link, None, 600).next(0, 0) == Leave(done=False)
        with pytest.raises(control_client.StopAsked, match="did not come from the buffer within 1 s; the trainer was asked to stop"):
            run.link.trained(Trained(step=0, version=0, started=0.0, ended=0.0))
        asker.join()


@pytest.mark.extra
def test_fifty_starts_of_a_trainer_while_the_buffer_tells_of_an_evaluation(
    environment: dict[str, str], nats: EmbeddedNats, signals: None, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's thread reads that status before the training's thread has heard that the client is up."""
    monkeypatch.setattr("services.trainer.control_client.Future", LateFuture)
    died: list[BaseException] = []

    async def report() -> None:
        bus = await Bus.connect(nats.url, "test")
        status = example(ServiceStatus, service="buffer", instance="buffer-0", gauges={"evaluations": 1.0}, at=time.time())
        await Registry(bus, run_name).renew(status)
        await bus.close()

    async def answer(request: EvaluationsRequest) -> EvaluationsEnded:
        versions = {"version": 3, "oldest": 3, "newest": 3, "live": 3}
        figures = EvalFigures(dataset="heldout", **versions, prompts=2, failed=0, samples=2, mean_reward=0.5)
        return EvaluationsEnded(evaluations=[figures][request.known :])

    async def serve(stop: threading.Event) -> None:
        bus = await Bus.connect(nats.url, "test")
        await bus.serve(Subjects(run_name).evaluations, EvaluationsRequest, answer)
        while not stop.is_set():
            await asyncio.sleep(0.05)
        await bus.close()

    stop = threading.Event()
    buffer = threading.Thread(target=lambda: asyncio.run(serve(stop)), daemon=True)
    buffer.start()
    for _ in range(50):
        asyncio.run(report())
        with failures_reported(died.append), ControlClient() as client:
            wait_until(lambda client=client: died or [found.version for found in client.evaluations] == [3], "the evaluation", pause=0.005)
            assert not died
    stop.set()
    buffer.join(timeout=30)
