"""``myxo env check`` of agents, and the skeletons of agents that ``myxo env new`` writes: they pass, and broken ones are told why."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from myxo.commands.env import SKELETONS
from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import free_port
from tests.integration.environments.live import ROOT

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


def checked(directory: Path, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
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
    exit_code, checks = checked(tmp_path, "broken:play", "--timeout", "0.5" if fault == "never ends" else "2")
    assert (checks[name]["result"], exit_code) == (result, any(check["result"] == "FAILED" for check in checks.values()))
    assert words in checks[name]["detail"]


@pytest.mark.parametrize("kind", ["agent", *(pytest.param(kind, marks=pytest.mark.extra) for kind in ("command", "tools"))])
def test_skeletons_pass(tmp_path: Path, kind: str) -> None:
    (tmp_path / "mine.py").write_text(SKELETONS[kind].text("mine", "Mine"))
    tools = ["shared.agents.mcp_agent:play", "--agent-options", json.dumps({"servers": {"mine": [sys.executable, "mine.py"]}})]
    words = {"agent": ["mine:play"], "command": ["--agent-command", f"{sys.executable} mine.py"], "tools": tools}
    code, checks = checked(tmp_path, *words[kind])
    assert (code, {check["result"] for check in checks.values()}) == (0, {"ok"}), checks


@pytest.mark.extra
def test_the_skeleton_of_a_service_passes(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "mine.py").write_text(SKELETONS["service"].text("mine", "Mine").replace("8090", str(port)))
    service = ChildProcess("service", [sys.executable, str(tmp_path / "mine.py")], tmp_path / "log")
    try:
        service.wait_ready(lambda: any("running on" in line for line in service.last_lines(20)), "its address", 60, pause_s=0.1)
        code, checks = checked(tmp_path, f"http://127.0.0.1:{port}/", "--agent")
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
    _, checks = checked(tmp_path, "mine:play")
    assert checks["one rollout"]["detail"] == "2 requests, reward 1"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["nowhere:play"], "AGENT"),
        pytest.param(["--agent-command", "/nowhere/program"], "--agent-command", marks=pytest.mark.extra),
        pytest.param(["textwrap:indent", "--agent-options", "[1]"], "--agent-options", marks=pytest.mark.extra),
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
