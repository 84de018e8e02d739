"""Writes what real clients did into ``docs/frameworks.md``: ``python -m docs.frameworks_page [--check | --run [NAME …]]``.

The lines that point a client at Myxo are those between ``# page`` and ``# /page`` of its script in ``tests/clients``, which a test plays.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docs.catalogue import settle

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "frameworks.md"
RESULTS = ROOT / "benchmarks" / "results" / "frameworks.json"
SCRIPTS = ROOT / "tests" / "clients"
TEST = "tests/integration/gateway/test_frameworks.py"

FEATURES = {
    "chat": "chat",
    "stream": "streamed",
    "tools": "tools",
    "parallel": "parallel calls",
    "required": "required tool",
    "structured": "structured output",
    "reasoning": "reasoning",
    "turns": "several turns",
}


@dataclass(frozen=True)
class Client:
    """A client of the matrix. ``packages``: what its environment is installed from; ``npm``: by npm, not by pip. ``gateway``: the section
    that it needs. ``evaluation``: its sessions are of held-out prompts. ``note``: what a reader has to know besides."""

    name: str
    script: str
    packages: tuple[str, ...]
    npm: bool = False
    gateway: dict[str, Any] = field(default_factory=dict)
    evaluation: bool = False
    note: str = ""


CLIENTS = (
    Client("openai", "openai_sdk.py", ("openai==3.57.0",)),
    Client("anthropic", "anthropic_sdk.py", ("anthropic==2.14.0",)),
    Client("openai-agents", "openai_agents.py", ("openai-agents==0.24.0",)),
    Client("langgraph", "langgraph_agent.py", ("langchain==1.5.2", "langchain-openai==1.7.4", "langgraph==1.2.24")),
    Client("litellm", "litellm_sdk.py", ("litellm==1.110.2",)),
    Client(
        "smolagents",
        "smolagents_agent.py",
        ("smolagents[openai]==1.26.0",),
        note="It adds its calls to what the model said, as text (`Calling tools: …`): each step begins another sample.",
    ),
    Client("pydantic-ai", "pydantic_ai_agent.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client(
        "strands-agents",
        "strands_agent.py",
        ("strands-agents[openai]==1.62.0",),
        note="[strands_agent.py](../examples/agents/README.md) is one as a command.",
    ),
    Client(
        "autogen",
        "autogen_agent.py",
        ("autogen-agentchat==0.7.5", "autogen-ext[openai]==0.7.5"),
        note="With `reflect_on_tool_use` the last request has no tools, and so another prompt: it begins another sample.",
    ),
    Client("agentscope", "agentscope_agent.py", ("agentscope==2.0.11",)),
    Client("crewai", "crewai_crew.py", ("crewai==1.15.30",), note="Each `kickoff` writes its prompt anew."),
    Client(
        "dspy", "dspy_program.py", ("dspy==3.4.1",), note="Its modules write a prompt of their own for each step, so each step is a sample."
    ),
    Client(
        "claude-code",
        "claude_code.py",
        ("@anthropic-ai/claude-code@2.1.197",),
        npm=True,
        note="A command for `agent_command`, whose prompt is in the JSON on standard input.",
    ),
    Client(
        "codex",
        "codex_cli.py",
        ("@openai/codex@0.171.0",),
        npm=True,
        note="A command for `agent_command`. Tools of other types are flattened or left out ([wire formats](wire-formats.md)).",
    ),
    Client("verifiers", "verifiers_tasks.py", ("verifiers==0.4.0", "uv"), note="Into an environment of its own; it asks by token ids."),
    Client("verifiers 0.1", "verifiers_older.py", ("verifiers==0.1.14",), note="Environments with `load_environment`."),
    Client(
        "mini-swe-agent",
        "mini_swe_agent.py",
        ("mini-swe-agent==2.4.6",),
        note="A command for `agent_command`; [mini_swe_agent.py](../examples/agents/README.md) gives the reward as well.",
    ),
    Client(
        "inspect-ai",
        "inspect_tasks.py",
        ("inspect-ai==0.3.285", "openai==3.57.0"),
        evaluation=True,
        note="Its tasks evaluate ([example](../examples/environments/inspect/README.md)); nothing that they ask is trained.",
    ),
)

_PART = re.compile(r"(<!-- (\w+): python -m docs\.frameworks_page -->\n).*?(<!-- /\2 -->)", re.DOTALL)
_LINES = re.compile(r"^ *# page\n(.*?)^ *# /page\n", re.DOTALL | re.MULTILINE)


def main() -> int:
    """Writes or checks the page; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m docs.frameworks_page", description="the matrix of clients in docs/frameworks.md")
    parser.add_argument("--check", action="store_true", help="only compare; exit code 1 where the page is out of date")
    parser.add_argument("--run", nargs="*", metavar="NAME", help="play all clients, or those named, and note what came of it first")
    given = parser.parse_args()
    if given.run is not None and (code := _played(given.run)):
        return code
    found = json.loads(RESULTS.read_text())["clients"]
    parts = {
        "matrix": _matrix(found),
        "clients": "\n".join(_section(client, found[client.name]) for client in CLIENTS if client.name in found),
    }
    return settle(PAGE, _PART.sub(lambda part: part[1] + parts[part[2]] + part[3], PAGE.read_text()), given.check)


def _played(names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as directory:
        chosen = [f"{TEST}::test_a_client_plays_and_what_it_samples_is_recorded[{name}]" for name in names] or [TEST]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "extra", *chosen]
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "MYXO_FRAMEWORKS": directory}).returncode
        known = json.loads(RESULTS.read_text())["clients"] if RESULTS.is_file() else {}
        known |= {path.stem: json.loads(path.read_text()) for path in Path(directory).glob("*.json")}
        ordered = {client.name: known[client.name] for client in CLIENTS if client.name in known}
        RESULTS.write_text(json.dumps({"clients": ordered}, indent=2) + "\n")
    return code


def _matrix(found: dict[str, Any]) -> str:
    lines = ["| client | " + " | ".join(FEATURES.values()) + " |", "|---|" + "---|" * len(FEATURES)]
    for name, row in found.items():
        anchor, cells = name.replace(" ", "-").replace(".", ""), [row["cells"].get(feature, "") for feature in FEATURES]
        lines.append(f"| [{name}](#{anchor}) | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _section(client: Client, row: dict[str, Any]) -> str:
    script = (SCRIPTS / client.script).read_text()
    language = "shell" if "export " in script else "toml" if "agent_service" in script or "agent_command = " in script else "python"
    lines = "\n".join(textwrap.dedent(block).rstrip() for block in _LINES.findall(script))
    ignored = ", ".join(f"`{name}`" for name in row["ignored"]) or "nothing"
    of_task = ", ".join(f"`{name}`" for name in row["of_task"])
    stands = f" The task's own value stands for {of_task}." if of_task else ""
    played = ", ".join(package.replace("==", " ") for package in row["packages"])
    note = f" {client.note}" if client.note else ""
    return f"### {client.name}\n\n```{language}\n{lines}\n```\n\nWith {played}. Ignored: {ignored}.{stands}{note}\n"


if __name__ == "__main__":
    sys.exit(main())
