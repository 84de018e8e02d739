"""Config texts and health checks: what must be in them, and what must not."""

import hashlib
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.accounts.permissions import MAX_PAYLOAD, ROLES, NatsSettings, RedisSettings, nats_conf, redis_conf, rights
from tests.support.tables import table

PASSWORDS = {role: f"{role}-secret" for role in (*ROLES, "health", "admission")}


def nats(settings: NatsSettings | None = None) -> dict[str, Any]:
    """The settings of nats.conf, in order."""
    text = nats_conf(rights("demo"), PASSWORDS, settings or NatsSettings())
    return {key: json.loads(value) for key, value in re.findall(r"^(\w+): (.*?)(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL)}


def redis(settings: RedisSettings | None = None) -> str:
    return redis_conf(rights("demo"), PASSWORDS, settings or RedisSettings())


def directive(text: str, name: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def test_nats_listens_stores_and_is_watched_from_inside_only() -> None:
    found = nats()
    assert found.pop("accounts")
    store = {"store_dir": "/data", "sync_interval": "1s"}
    assert found == {"listen": "0.0.0.0:4222", "http": "127.0.0.1:8222", "max_payload": MAX_PAYLOAD, "jetstream": store}
    assert nats(NatsSettings(max_payload=4096))["max_payload"] == 4096
    assert nats(NatsSettings(tls="/x"))["tls"] == {"cert_file": "/x/certificate.pem", "key_file": "/x/key.pem", "timeout": 5}


def test_every_role_has_one_user_of_nats_with_rights_of_its_own() -> None:
    accounts = nats()["accounts"]
    users = {name: user for name, account in accounts.items() for user in account["users"]}
    assert {name for name, account in accounts.items() if account.get("jetstream")} == {"run"}
    users = [users["run" if role == "operator" else role] for role in ROLES]
    assert [(user["user"], user["password"]) for user in users] == [(f"{role}.demo", f"{role}-secret") for role in ROLES]
    permissions = [user["permissions"] for user in users]
    assert all(found[way]["allow"] for found in permissions for way in ("subscribe", "publish"))
    assert [found["allow_responses"]["max"] for found in permissions if "allow_responses" in found] == [1, 1, 1, 1]


def test_redis_has_no_user_without_a_password_and_no_password_in_the_clear() -> None:
    users = {line.split()[0]: line.split()[1:] for line in directive(redis(), "user")}
    assert set(users) == {"default", "health", "admission", *(f"{role}.demo" for role in ROLES if role != "environment")}
    assert users.pop("default") == ["off", "resetpass", "resetkeys", "resetchannels", "-@all"]
    for name, rules in users.items():
        assert rules[:2] == ["on", f"#{hashlib.sha256(PASSWORDS[name.split('.')[0]].encode()).hexdigest()}"]
        assert "-@all" in rules and "resetchannels" in rules
        assert not [rule for rule in rules if rule.startswith(("+@", "allkeys", "allchannels", "&", "nopass", ">"))]
    assert "secret" not in redis()


@table(
    ("role", "keys", "commands"),
    [
        ("buffer", "%RW~demo:group:*", ["+ping", "+exists", "+getrange", "+info", "+setnx", "+unlink"]),
        (
            "rollout",
            "%RW~demo:group:*",
            ["+ping +getrange +setnx", "(%RW~demo:session:* -@all +expire +get +llen +lrange +rpush +rpushx +setnx +unlink)"],
        ),
        (
            "gateway",
            "%RW~demo:session:*",
            [
                *("+ping +get +llen +lrange +rpushx", "(%W~demo:group:* -@all +setnx)", "(%RW~demo:ingest:* -@all +get +set)"),
                "(%RW~demo:command:* -@all +expire +getrange +setnx +unlink)",
            ],
        ),
        ("reward", "%R~demo:group:*", ["+ping", "+getrange"]),
        (
            "trainer",
            "%R~demo:group:* %RW~demo:exchange:*",
            ["+ping +get +getrange +hexists +hmget +hset +set +unlink", "(%RW~demo:command:* -@all +getrange +setnx +unlink)"],
        ),
        ("operator", "%RW~demo:*", ["+ping", "+exists", "+get", "+getrange", "+scan", "+unlink"]),
    ],
)
def test_a_role_has_its_keys_and_commands(role: str, keys: str, commands: list[str]) -> None:
    [line] = [line for line in directive(redis(), "user") if line.startswith(f"{role}.demo ")]
    assert line.endswith(f"{keys} -@all {' '.join(commands)}")


def test_the_health_account_may_ping() -> None:
    [line] = [line for line in directive(redis(), "user") if line.startswith("health ")]
    assert line.endswith("resetkeys -@all +ping")


def test_redis_keeps_what_it_is_given_and_encrypts_when_asked() -> None:
    text = redis()
    assert directive(text, "auto-aof-rewrite-min-size") == ["1gb"]
    for name, value in {"appendonly": "yes", "dir": '"/data"', "unixsocket": '"/tmp/redis.sock"', "maxmemory-policy": "noeviction"}.items():
        assert directive(text, name) == [value]
    assert directive(text, "port") == ["6379"] and not directive(text, "tls-port")
    encrypted = redis(RedisSettings(tls="/x"))
    assert directive(encrypted, "port") == ["0"] and directive(encrypted, "tls-port") == ["6379"]
    assert directive(encrypted, "tls-key-file") == ['"/x/key.pem"']
    assert directive(encrypted, "tls-auth-clients") == ["no"]


# --- the health checks of the compose files: no password where other processes can read it

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
