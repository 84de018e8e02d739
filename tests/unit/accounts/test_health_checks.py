"""The health checks of the compose files: no password where other processes can read it."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = ROOT / "deploy" / "compose"
PASSWORD = "the-password-of-health"

REDIS_CLI = """#!/bin/sh
printf '%s\\n' "$0" "$@" "$REDISCLI_AUTH" > {told}.new
tr '\\0' '\\n' < /proc/$PPID/cmdline > {told}.shell
mv {told}.new {told}
echo '{answer}'
"""
"""What stands in for redis-cli notes its arguments, its password and the arguments of the shell around it."""


def redis_check(answer: str, directory: Path) -> tuple[int, list[str], str]:
    """Runs the check of Redis as its container does: exit code, arguments of the client and its password, command line of the shell."""
    kind, command = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]["redis"]["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    told, client = directory / "told", directory / "redis-cli"
    (directory / "health").write_text(PASSWORD)
    client.write_text(REDIS_CLI.format(told=told, answer=answer))
    client.chmod(0o755)
    command = command.replace("$$", "$").replace("/credentials/health", str(directory / "health"))
    environment = os.environ | {"PATH": f"{directory}:{os.environ['PATH']}"}
    code = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, timeout=60, check=False).returncode
    return code, told.read_text().splitlines(), told.with_suffix(".shell").read_text()


@pytest.mark.parametrize(("answer", "healthy"), [("PONG", True), ("NOAUTH Authentication required.", False)])
def test_redis_gets_its_password_by_the_environment(answer: str, healthy: bool, tmp_path: Path) -> None:
    code, (*arguments, password), shell = redis_check(answer, tmp_path)
    assert (code == 0) == healthy
    assert password == PASSWORD
    assert "ping" in arguments and PASSWORD not in " ".join(arguments)
    assert PASSWORD not in shell


def test_no_other_check_knows_a_password() -> None:
    for path in COMPOSE.glob("*.yaml"):
        for name, service in (yaml.safe_load(path.read_text()).get("services") or {}).items():
            words = " ".join(service.get("healthcheck", {}).get("test", []))
            assert name == "redis" or "/credentials" not in words, f"{path.name}: {name}"
            assert "--pass" not in words and " -a " not in words, f"{path.name}: {name}"
    checks = [line for line in (COMPOSE / "Dockerfile").read_text().splitlines() if line.startswith("HEALTHCHECK")]
    assert checks and not any("credentials" in line for line in checks)
