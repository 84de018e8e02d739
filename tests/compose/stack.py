"""A compose project under test: its commands, what its run says of itself, its end."""

import http.client
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from shared.process.embedded_servers import free_port
from tests.support.images import base_image

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose"

LONG_LIVED = {"nats", "redis", "buffer", "console", "rollout", "reward", "trainer"}
"""The services that stay up while a run continues."""

TOLD = {
    "nats": 5,
    "redis": 5,
    "router": 5,
    "submit": 5,
    "watch": 10,
    "reward": 15,
    "gateway": 15,
    "agent-proxy": 5,
    "buffer": 15,
    "console": 5,
    "rollout": 15,
    "trainer": 15,
}
"""Service → lines of its log that a failed assertion quotes; those that explain most come last."""

COMMAND_SECONDS = 300
POLL_INTERVAL_S = 2.0
BUILD_SECONDS = 2400


def stack_files() -> list[Path]:
    """Compose files that every stack here needs over the first: an operator to ask, and a NATS image that health checks can run in."""
    here = Path(__file__).parent
    shell = subprocess.run(
        ["docker", "run", "--rm", "--entrypoint", "sh", base_image("NATS_IMAGE"), "-c", "true"],
        capture_output=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    return [here / "operator.yaml", *([] if shell.returncode == 0 else [here / "nats-without-shell.yaml"])]


class Stack:
    """One project of `deploy/compose/compose.yaml`.

    Args:
        project: its name. run: the run's id. environment: over this process's. files: further compose files over the first.
    """

    def __init__(self, project: str, run: str, environment: dict[str, str], files: Sequence[Path] = ()) -> None:
        self.project, self.run = project, run
        images = {name: base_image(name) for name in ("PYTHON_IMAGE", "NATS_IMAGE", "REDIS_IMAGE")}
        self._environment = os.environ | images | {"MYXO_PROJECT": project, "MYXO_RUN": run, "COMPOSE_PROGRESS": "plain"}
        self._environment["MYXO_SLOW_STEPS"] = str(Path(__file__).with_name("slow_steps.py"))
        self._environment |= {"MYXO_CONSOLE_PORT": str(free_port())} | environment  # stacks side by side have one host
        self._console_token = ""
        self._files = [COMPOSE / "compose.yaml", *files]

    def compose(self, *arguments: str, seconds: float = COMMAND_SECONDS, check: bool = True, **environment: str) -> str:
        """``docker compose ARGUMENTS``; returns what it printed. Raises AssertionError where it fails and ``check``."""
        try:
            done = self._run(*arguments, seconds=seconds, **environment)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"{' '.join(arguments)} took over {seconds:g} s\n{error.stdout!r}\n{error.stderr!r}") from None
        assert not check or done.returncode == 0, (
            f"docker compose {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.said()}"
        )
        return done.stdout

    def keep(self, **environment: str) -> None:
        """Environment for all later commands."""
        self._environment |= environment

    def containers(self, *services: str) -> list[dict[str, Any]]:
        """What ``ps`` says of every container, the ended ones too."""
        out = self.compose("ps", "--all", "--format", "json", *services)
        return [json.loads(line) for line in out.splitlines() if line.strip()]

    def status(self) -> dict[str, Any] | None:
        """``myxo status --json``, asked in the operator's container; None while it cannot tell."""
        out = self.compose("exec", "-T", "operator", "myxo", "status", self.run, "--json", check=False)
        try:
            answer: dict[str, Any] = json.loads(out)
        except ValueError:
            return None
        return answer

    def steps(self) -> int:
        """Steps trained; -1 while nobody can tell. The console tells them: a command for each look would take as much time as the run."""
        if not self._console_token:
            said = self.compose("exec", "-T", "console", "python", "-m", "services.console", "address", check=False)
            self._console_token = said.strip().rpartition("?token=")[2]
        address = f"http://127.0.0.1:{self._environment['MYXO_CONSOLE_PORT']}/api/overview"
        asked = urllib.request.Request(address, headers={"Authorization": f"Bearer {self._console_token}"})
        try:
            with urllib.request.urlopen(asked, timeout=20) as answer:
                told = json.load(answer)["steps"]
        except urllib.error.HTTPError as error:
            if error.code == 401:  # the console was not up yet, or has another token by now
                self._console_token = ""
            return -1
        except (OSError, http.client.HTTPException):
            return -1
        return -1 if told is None else int(told)

    def until(self, what: str, condition: Callable[[], Any], seconds: float) -> Any:
        """Looks until ``condition`` holds; returns its value."""
        end = time.monotonic() + seconds
        while True:
            value = condition()
            if value:
                return value
            assert time.monotonic() < end, f"{what} did not come within {seconds:g} s\n{self.said()}"
            time.sleep(POLL_INTERVAL_S)

    def unhealthy(self) -> set[str]:
        """The services that stay up and are not healthy, or not there, now."""
        return LONG_LIVED - {one["Service"] for one in self.containers() if one["Health"] == "healthy"}

    def said(self) -> str:
        """How the containers stand and what they said last, for a failed assertion."""
        asked = [self._run("logs", "--no-color", "--tail", str(lines), service, seconds=120) for service, lines in TOLD.items()]
        asked += [self._run("ps", "--all", seconds=120), self._run("exec", "-T", "operator", "myxo", "status", self.run, seconds=120)]
        return "\n".join(done.stdout + done.stderr for done in asked)

    def _run(self, *arguments: str, seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
        files = [word for file in self._files for word in ("-f", str(file))]
        command = ["docker", "compose", *files, *arguments]
        return subprocess.run(command, env=self._environment | environment, capture_output=True, text=True, timeout=seconds, check=False)

    def remove(self) -> None:
        """Takes containers, networks and volumes away."""
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", check=False)
