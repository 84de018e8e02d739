"""``myxo env check`` of live environments and of agents, and the skeletons that ``myxo env new`` writes."""

import asyncio
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from myxo.commands.agent_check import command_agent
from myxo.commands.env import SKELETONS
from myxo.main import main
from shared.bus.connection import Bus
from shared.environment.environment_client import open_environment
from shared.environment.protocol import EnvironmentAway, EnvironmentFailed
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import EmbeddedNats, free_port
from shared.runtime.errors import MyxoError
from tests.integration.environments.live import ROOT, EnvironmentProcess, mute_server, node_example, page_example, python_example
from tests.support.tables import rare
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


@pytest.mark.parametrize("example", [pytest.param(python_example, id="python"), rare(node_example, id="node")])
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
        rare("late-describe", "describe", "late: the answer to describe did not come within 1 s"),
        rare("error-500", "one sample", "answered score with HTTP 500: the judge is ill"),
        rare("error-in-200", "one sample", "says: no such task"),
        ("bare-500", "one sample", "answered score with HTTP 500"),
        rare("other-version", "describe", "protocol is 2; expected 1"),
        ("redirect", "one sample", "answered score with HTTP 307, a redirect, which is not followed"),
        ("redirected-describe", "describe", "answered describe with HTTP 307, a redirect, which is not followed"),
        rare("non-json", "one sample", "expected JSON"),
        rare("too-large", "one sample", "answered score with more than 4194304 bytes"),
        ("label-needed", "no label", "a prompt may have none: score it, or say why not; answered score with HTTP 500"),
        rare("label-needed-in-words", "no label", "AttributeError: 'NoneType' object has no attribute 'strip'"),
        rare("strict", "unknown fields in the request", "answered score with HTTP 422: unknown field"),
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


ASK = """
import asyncio, json, time, urllib.request

def ask(base_url, api_key, path="/chat/completions"):
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(base_url + path, json.dumps({"messages": []}).encode(), headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]

async def later(base_url, api_key):
    return await asyncio.to_thread(ask, base_url, api_key)
"""

BROKEN = {
    "asks nobody": ("async def play(data, base_url, api_key): return 1.0", "one rollout", "FAILED", "never asked"),
    "asks elsewhere": (
        "async def play(data, base_url, api_key):\n try: ask(base_url, api_key, '/completions')\n except OSError: return 0.0",
        "one rollout",
        "FAILED",
        "POST /v1/completions",
    ),
    "gives no number": (
        "async def play(data, base_url, api_key):\n await later(base_url, api_key)\n return 'good'",
        "one rollout",
        "FAILED",
        "reward",
    ),
    "gives nan": (
        "async def play(data, base_url, api_key):\n await later(base_url, api_key)\n return float('nan')",
        "one rollout",
        "FAILED",
        "reward",
    ),
    "never ends": (
        "async def play(data, base_url, api_key):\n await later(base_url, api_key)\n await asyncio.sleep(600)",
        "one rollout",
        "FAILED",
        "did not end within 0.5 s",
    ),
    "continues after its end": (
        "async def play(data, base_url, api_key):\n"
        " while True:\n  try: return float(bool(await later(base_url, api_key)))\n  except OSError: await asyncio.sleep(0.2)",
        "the session has ended (410)",
        "FAILED",
        "continued",
    ),
    "blocks": (
        "async def play(data, base_url, api_key): return float(bool(ask(base_url, api_key)))",
        "8 rollouts at once",
        "warning",
        "wait for one another",
    ),
    "gives up": (
        "async def play(data, base_url, api_key): return float(bool(await later(base_url, api_key)))",
        "429, then an answer",
        "warning",
        "max_retries",
    ),
    "needs a label": (
        "async def play(data, base_url, api_key):\n await later(base_url, api_key)\n return float(data['label'].strip() == '42')",
        "no label",
        "warning",
        "need not have one",
    ),
}


def agent_checked(directory: Path, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Runs the command as a process: its exit code, and the checks by name."""
    command = [sys.executable, "-m", "myxo.main", "env", "check", *words, "--json"]
    path = {"PYTHONPATH": f"{ROOT}:{directory}", "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    done = subprocess.run(command, cwd=directory, env=path, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    return done.returncode, {check["name"]: check for check in json.loads(done.stdout)["checks"]}


KEPT = ("asks nobody", "asks elsewhere", "gives no number", "never ends", "needs a label")


@pytest.mark.parametrize("fault", [pytest.param(fault, marks=() if fault in KEPT else pytest.mark.extra) for fault in BROKEN])
def test_a_broken_agent_is_told_why(tmp_path: Path, fault: str) -> None:
    code, name, result, words = BROKEN[fault]
    (tmp_path / "broken.py").write_text(ASK + code + "\n")
    exit_code, checks = agent_checked(tmp_path, "broken:play", "--timeout", "0.5" if fault == "never ends" else "2")
    assert (checks[name]["result"], exit_code) == (result, any(check["result"] == "FAILED" for check in checks.values()))
    assert words in checks[name]["detail"]


@pytest.mark.parametrize("kind", ["agent", *(rare(kind) for kind in ("command", "tools"))])
def test_skeletons_pass(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine.py").write_text(SKELETONS[kind].text("mine", "Mine"))
    tools = ["shared.agents.mcp_agent:play", "--agent-options", json.dumps({"servers": {"mine": [sys.executable, "mine.py"]}})]
    words = {"agent": ["mine:play"], "command": ["--agent-command", f"{sys.executable} mine.py"], "tools": tools}
    code, checks = agent_checked(tmp_path, *words[kind])
    assert (code, {check["result"] for check in checks.values()}) == (0, {"ok"}), checks


@pytest.mark.extra
def test_the_skeleton_of_a_service_passes(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "mine.py").write_text(SKELETONS["service"].text("mine", "Mine").replace("8090", str(port)))
    service = ChildProcess("service", [sys.executable, str(tmp_path / "mine.py")], tmp_path / "log")
    try:
        service.wait_ready(lambda: any("running on" in line for line in service.last_lines(20)), "its address", 60, pause_s=0.1)
        code, checks = agent_checked(tmp_path, f"http://127.0.0.1:{port}/", "--agent")
    finally:
        service.stop(5)
    assert (code, {check["result"] for check in checks.values()}) == (0, {"ok"}), checks


@pytest.mark.extra
@pytest.mark.parametrize("client", ["openai", "responses", "anthropic"])
def test_clients_are_answered_streamed_and_whole(tmp_path: Path, client: str) -> None:
    """The houses' own clients read what the script says."""
    code = {
        "openai": """
            from openai import AsyncOpenAI
            async def play(data, base_url, api_key):
                client, asked = AsyncOpenAI(base_url=base_url, api_key=api_key), dict(model=data["model"], messages=data["messages"])
                whole = (await client.chat.completions.create(**asked)).choices[0].message.content
                async with client.chat.completions.stream(**asked) as stream:
                    told = (await stream.get_final_completion()).choices[0].message.content
                return float(whole == told != "")
            """,
        "responses": """
            from openai import AsyncOpenAI
            async def play(data, base_url, api_key):
                client, asked = AsyncOpenAI(base_url=base_url, api_key=api_key), dict(model=data["model"], input=data["messages"])
                whole = (await client.responses.create(**asked)).output_text
                async with client.responses.stream(**asked) as stream:
                    told = (await stream.get_final_response()).output_text
                return float(whole == told != "")
            """,
        "anthropic": """
            from anthropic import AsyncAnthropic
            async def play(data, base_url, api_key):
                client = AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
                asked = dict(model=data["model"], messages=data["messages"], max_tokens=9)
                whole = (await client.messages.create(**asked)).content[0].text
                async with client.messages.stream(**asked) as stream:
                    told = (await stream.get_final_message()).content[0].text
                return float(whole == told != "")
            """,
    }
    (tmp_path / "mine.py").write_text(textwrap.dedent(code[client]))
    _, checks = agent_checked(tmp_path, "mine:play")
    assert checks["one rollout"]["detail"] == "2 requests, reward 1"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["nowhere:play"], "AGENT"),
        rare(["--agent-command", "/nowhere/program"], "--agent-command"),
        rare(["textwrap:indent", "--agent-options", "[1]"], "--agent-options"),
        ([], "URL"),
    ],
)
def test_bad_input(tmp_path: Path, words: list[str], field: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "myxo.main", "env", "check", *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, field in done.stderr, done.stderr.count("\n")) == (2, True, 1), done.stderr


@pytest.mark.parametrize("last", ["echo 0.5", "echo no licence >&2; exit 3", "wait"])
async def test_what_a_checked_command_started_ends_with_it_as_in_a_run(tmp_path: Path, last: str) -> None:
    """It holds the command's output open."""
    pid = tmp_path / "pid"
    played = asyncio.create_task(command_agent(["sh", "-c", f"sleep 600 & echo $! > {pid}; {last}"])({}, "http://h/v1", "key"))
    child = (await until(lambda: pid.exists() and pid.read_text(), "what it starts")).strip()
    if last == "wait":  # until its deadline
        played.cancel()
    await until(played.done, "the end of the command")
    assert (last == "wait") == played.cancelled()
    if last == "echo 0.5":
        assert played.result() == 0.5
    elif not played.cancelled():
        assert str(played.exception()) == "ended with exit code 3: no licence"
    await until(lambda: not Path(f"/proc/{child}").exists(), "the end of what it started")
