"""``myxo env check`` against live environments: passes those that keep the protocol, and says what is wrong with those that do not."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.main import main
from shared.bus.connection import Bus
from shared.environment.environment_client import open_environment
from shared.environment.protocol import EnvironmentAway, EnvironmentFailed
from shared.process.embedded_servers import EmbeddedNats, free_port
from shared.runtime.errors import MyxoError
from tests.integration.environments.live import ROOT, EnvironmentProcess, mute_server, node_example, page_example, python_example
from tests.support.waiting import until

NAMES = [
    "describe",
    "content type",
    "one sample",
    "a group of 4",
    "an empty response",
    "responses beyond ASCII",
    "a response of 100 kB",
    "unknown fields in the request",
    "8 requests at once",
    "no label",
    "a prompt of chat messages",
    "the same request twice",
    "time",
]


async def checked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Runs the command beside the servers of this test: exit code, standard output, standard error."""

    def run() -> int:
        try:
            return main(["env", "check", *words])
        except SystemExit as exit_:
            return exit_.code if isinstance(exit_.code, int) else 1

    code = await asyncio.to_thread(run)
    out = capsys.readouterr()
    return code, out.out, out.err


def command(*words: str, **environment: str) -> tuple[int, str, str]:
    """The command as a process."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("NATS_URL", "NATS_URL_FILE")}
    done = subprocess.run(
        [sys.executable, "-m", "myxo.main", "env", "check", *words],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    return done.returncode, done.stdout, done.stderr


async def answering(url: str, bus: Bus | None = None, run: str = "") -> None:
    """Waits until the environment describes itself."""
    environment = open_environment("example", url, bus, run)

    async def described() -> bool:
        try:
            return bool(await environment.describe(5))
        except MyxoError:
            return False

    await until(described, url)
    await environment.close()


@pytest.fixture
def short_describe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.environment.conformance.DESCRIBE_SECONDS", 1.0)


@pytest.mark.parametrize(
    "example", [pytest.param(python_example, id="python"), pytest.param(node_example, id="node", marks=pytest.mark.extra)]
)
async def test_the_examples_keep_the_protocol(example: Callable[[int, Path], EnvironmentProcess], tmp_path: Path) -> None:
    port = free_port()
    with example(port, tmp_path / "example.log") as process:
        url = f"http://127.0.0.1:{port}"
        await answering(url)
        code, out, err = await asyncio.to_thread(command, url, "--json")
        result = json.loads(out)
        assert (code, err, result["ok"]) == (0, "", True), out
        assert [check["name"] for check in result["checks"]] == NAMES
        assert {check["result"] for check in result["checks"]} == {"ok"}, out
        process.process.terminate()
        assert process.process.wait(30) in (0, -15)


@pytest.mark.extra
async def test_the_responder_of_the_page_keeps_the_protocol(bus: Bus, nats: EmbeddedNats, run_name: str, tmp_path: Path) -> None:
    secret = tmp_path / "nats-url"
    secret.write_text(nats.url + "\n")
    with page_example(nats.url, run_name, tmp_path):
        await answering("nats:grader", bus, run_name)
        code, out, err = await asyncio.to_thread(command, "nats:grader", "--run", run_name, NATS_URL_FILE=str(secret))
    assert (code, err) == (0, ""), out
    assert "nats:grader keeps the protocol (checks: 12, failed: 0, warnings: 0)" in out


async def test_an_environment_that_is_right_passes_and_says_what_it_gave(capsys: pytest.CaptureFixture[str], odd: str) -> None:
    code, out, _ = await checked(
        capsys, f"{odd}/right", "--prompt", "a?", "--label", "b", "--response", "ab", "--response", "c", "--response", "d"
    )
    assert code == 0, out
    assert [line[8:40].strip() for line in out.splitlines()[:-1]] == [*NAMES[:4], "the 3 responses", *NAMES[4:]]
    assert "rewards 1, 1, 1; parts length" in out
    assert "keeps the protocol" in out.splitlines()[-1]


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        ("wrong-count", "one sample", "rewards has 2 entries; expected 1"),
        ("nan", "a group of 4", "rewards[3] is nan; expected a finite number"),
        ("late", "one sample", "late: the answer to score did not come within 1 s"),
        pytest.param("late-describe", "describe", "late: the answer to describe did not come within 1 s", marks=pytest.mark.extra),
        pytest.param("error-500", "one sample", "answered score with HTTP 500: the judge is ill", marks=pytest.mark.extra),
        pytest.param("error-in-200", "one sample", "says: no such task", marks=pytest.mark.extra),
        ("bare-500", "one sample", "answered score with HTTP 500"),
        pytest.param("other-version", "describe", "protocol is 2; expected 1", marks=pytest.mark.extra),
        ("redirect", "one sample", "answered score with HTTP 307, a redirect, which is not followed"),
        ("redirected-describe", "describe", "answered describe with HTTP 307, a redirect, which is not followed"),
        pytest.param("non-json", "one sample", "expected JSON", marks=pytest.mark.extra),
        pytest.param("too-large", "one sample", "answered score with more than 4194304 bytes", marks=pytest.mark.extra),
        ("label-needed", "no label", "a prompt may have none: score it, or say why not; answered score with HTTP 500"),
        pytest.param(
            "label-needed-in-words", "no label", "AttributeError: 'NoneType' object has no attribute 'strip'", marks=pytest.mark.extra
        ),
        pytest.param("strict", "unknown fields in the request", "answered score with HTTP 422: unknown field", marks=pytest.mark.extra),
    ],
)
async def test_a_fault_is_found_and_named(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest, odd: str, fault: str, check: str, words: str
) -> None:
    if fault == "late-describe":
        request.getfixturevalue("short_describe")
    code, out, err = await checked(capsys, f"{odd}/{fault}")
    assert (code, err) == (1, ""), out
    line = next((line for line in out.splitlines() if line[8:40].strip() == check), "")
    assert line.startswith("FAILED") and words in line, out
    assert "does not keep the protocol" in out.splitlines()[-1]


async def test_what_an_environment_only_should_do_is_a_warning(capsys: pytest.CaptureFixture[str], odd: str) -> None:
    code, out, _ = await checked(capsys, f"{odd}/dice")
    [line] = [line for line in out.splitlines() if "the same request twice" in line]
    assert (code, line.split()[0]) == (0, "warning"), out
    assert "checks: 13, failed: 0, warnings: 1" in out


@pytest.mark.usefixtures("short_describe")
async def test_nobody_there_and_nobody_who_answers(capsys: pytest.CaptureFixture[str], bus: Bus, nats: EmbeddedNats, run_name: str) -> None:
    code, out, _ = await checked(capsys, f"http://127.0.0.1:{free_port()}", "--json")
    assert code == 1
    assert "cannot be reached: Connect" in json.loads(out)["checks"][0]["detail"]
    code, out, _ = await asyncio.to_thread(command, "nats:nobody", "--run", run_name, NATS_URL=nats.url)
    assert code == 1
    assert f"cannot be reached: no reply on {run_name}.environment.nobody.describe" in out
    async with mute_server() as url:
        code, out, _ = await checked(capsys, url)
    assert (code, len(out.splitlines())) == (1, 2), out
    assert "late: the answer to describe did not come within 1 s" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ftp://judge"], "URL = 'ftp://judge': expected http://host:port"),
        (["http://me:hush@169.254.169.254"], "URL = '169.254.169.254': 169.254.169.254 is a link-local address"),
        (["nats:grader"], "--run = None: required for nats:NAME"),
        (["nats:grader", "--run", "Upper"], "--run = 'Upper'"),
        (["nats:grader", "--run", "tiny"], "NATS_URL = None: required"),
        (["http://judge", "--timeout", "0"], "more than 0"),
        (["http://judge", "--timeout", "soon"], "invalid"),
        ([], "URL"),
    ],
)
async def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], expected: str
) -> None:
    monkeypatch.delenv("NATS_URL", raising=False)
    monkeypatch.delenv("NATS_URL_FILE", raising=False)
    code, out, err = await checked(capsys, *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and expected in err and "hush" not in err, err


@pytest.mark.parametrize("host", ["0xa9fea9fe", "0xa9.0xfe.0xa9.0xfe", "2852039166", "0x0"])
async def test_a_name_that_resolves_to_a_blocked_address_is_not_connected_to(host: str) -> None:
    environment = open_environment("meta", f"http://{host}:80")
    with pytest.raises(EnvironmentFailed, match="environment meta at .*(never connected to|no URL to connect to)"):
        await environment.describe(30)
    await environment.close()


async def test_a_host_that_does_not_exist_is_away() -> None:
    environment = open_environment("judge", "http://no-such-host.invalid:8080")
    with pytest.raises(EnvironmentAway, match="environment judge at http://no-such-host.invalid:8080 cannot be reached"):
        await environment.describe(30)
    await environment.close()
