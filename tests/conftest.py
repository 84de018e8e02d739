"""Fixtures of all suites: real servers, a tiny checkpoint."""

import gc
import itertools
import os
import sys
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from shared.bus.connection import Bus
from shared.process.embedded_servers import EmbeddedNats, EmbeddedValkey
from shared.runtime.telemetry import STRICT
from shared.store.payload_store import Store

# workers share few cores, on which torch's threads would spin while they wait for each other; torch reads it when it is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

# a slow machine is no failure of the code
settings.register_profile("myxo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("myxo")

EXTRA_FOLDERS = ("tests/integration/benchmarks/", "tests/integration/nodes/")
"""All tests of these are marked extra: they take minutes each, and what they cover is tested at a smaller scale as well."""

MOST_LOGS, LAST_LINES, LONGEST_LINE = 20, 25, 500
"""Of a failed test's logs: how many are shown, and how much of each."""

_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declares the suites' own options."""
    parser.addoption("--pictures", action="store_true", help="take the documentation's pictures of the console anew, into docs/pictures")
    parser.addoption("--extra-share", metavar="K/N", help="of the tests marked extra, only those of files whose hash modulo N is K")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of `EXTRA_FOLDERS`, and leaves out those marked extra whose file is not in the share that ``--extra-share`` names."""
    for item in items:
        if item.location[0].startswith(EXTRA_FOLDERS):
            item.add_marker(pytest.mark.extra)
    if not (share := config.getoption("extra_share")):
        return
    index, count = map(int, share.split("/"))
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("extra"))]
    # by file, whose tests share what they set up; where a test has much of its own, each by itself: extra(each=True)
    names = {item: item.nodeid if mark.kwargs.get("each") else item.location[0] for item, mark in marked}
    left_out = {item for item, name in names.items() if zlib.crc32(name.encode()) % count != index % count}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the seconds that the tests of each tier took in all, set-up and teardown included."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds["/".join(report.nodeid.split("/")[:2])] += report.duration  # type: ignore[assignment]
    if seconds.total() > 60:
        terminalreporter.section("seconds of each tier, workers added up")
        for tier, spent in seconds.most_common():
            terminalreporter.line(f"{spent:7.0f} {tier}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Forks the workers of a run of all tests: each would import for seconds what the others do, and so would what they start."""
    if config.args == config.getini("testpaths"):
        from tests.support.fork_server import fork_workers

        fork_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Gives several workers whole runs and light tests side by side."""
    from tests.support.work_order import FewRunsAtOnce  # it needs xdist, which may be switched off

    return FewRunsAtOnce(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes a failure into the log when it happens: one that is cut off, by a deadline say, would end before its summary."""
    if report.failed and not os.environ.get("PYTEST_XDIST_WORKER"):
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}", file=sys.__stderr__, flush=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the last lines of each log that a failed test's processes left in its directory."""
    report = yield
    if report.failed and (directory := getattr(item, "funcargs", {}).get("tmp_path")):
        for log in sorted(path for path in directory.rglob("*.log") if path.is_file() and path.stat().st_size)[:MOST_LOGS]:
            lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
            report.sections.append((f"end of {log.relative_to(directory)}", "\n".join(line[:LONGEST_LINE] for line in lines)))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Does without garbage collection, a quarter of its time, and takes the thousands of tests out of what each later one looks through."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def own_logs() -> Iterator[None]:
    """A command that a test runs in this process may silence or redirect the logs; the next test has them as they were."""
    yield
    structlog.reset_defaults()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what commands remember between them out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYXO_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def strict_metrics() -> Iterator[None]:
    """In tests, and in the services that they start, a metric that is not declared is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STRICT, "1")
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 checkpoint directory with a character tokenizer."""
    from tests.support.tiny_model import write_tiny_model  # torch takes seconds to import: only where it is needed

    path: Path = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(path)
    return path


@pytest.fixture(scope="session")
def nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedNats]:
    """A NATS server that tests share: each uses a run name of its own."""
    # hundreds of streams gather there: synced each second they would take a tenth of the machine, and nobody cuts its power
    server = EmbeddedNats(tmp_path_factory.mktemp("nats"), sync_interval=120)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    """A Valkey server that tests share: each uses a run name of its own."""
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def mortal_nats(tmp_path: Path) -> Iterator[EmbeddedNats]:
    """A NATS server of the test's own, to be killed."""
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def mortal_valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    """A Valkey server of the test's own, to be killed."""
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def bus(nats: EmbeddedNats) -> AsyncIterator[Bus]:
    """A connection to the shared NATS server."""
    connection = await Bus.connect(nats.url, "test")
    yield connection
    await connection.close()


@pytest.fixture
async def store(valkey: EmbeddedValkey, run_name: str) -> AsyncIterator[Store]:
    """A connection to the shared Valkey server, for the test's run."""
    connection = Store(valkey.url, run_name)
    yield connection
    await connection.close()


@pytest.fixture
def run_name() -> str:
    """A run's name that no other test uses."""
    return f"run-{next(_numbers)}"


@pytest.fixture
def crash() -> Callable[[EmbeddedNats | EmbeddedValkey], None]:
    """kill -9 for a server, which then waits until it is gone; `start` brings it back."""

    def kill(server: EmbeddedNats | EmbeddedValkey) -> None:
        assert server.process is not None
        server.process.kill()
        server.process.wait(30)

    return kill
