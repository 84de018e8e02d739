"""``myxo doctor`` on this machine as it is, and on one in which faults were planted: by mounts of its own, limits, files and servers."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import free_port, nats_binary, valkey_binary
from shared.sandbox.sandbox_command import bwrap_program
from tests.integration.myxo.command import ROOT, Myxo

Found = list[dict[str, str]]
Words = Sequence[str | Path]

SMI = """#!/bin/sh
echo "0, NVIDIA H100, 470.10, 81559, 40000, {errors}"
"""


def doctor(
    words: Words = (), mounts: Words = (), environment: Mapping[str, str] | None = None, before: Callable[[], None] | None = None
) -> Found:
    """What it finds, in a view of this machine with these mounts. It must exit as its findings say."""
    program = bwrap_program()
    view = [] if not mounts or program is None else [program, "--dev-bind", "/", "/", *map(str, mounts), "--"]
    kept = {key: value for key, value in os.environ.items() if key not in ("NATS_URL", "REDIS_URL")}
    done = subprocess.run(
        [*view, sys.executable, "-m", "myxo.main", "doctor", "--json", *map(str, words)],
        cwd=ROOT,
        env={**kept, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=before,
    )
    assert done.stdout, done.stderr
    found: Found = json.loads(done.stdout)
    assert done.returncode == any(one["state"] == "fault" for one in found), done.stderr
    return found


def state(found: Found, subject: str, *words: str) -> str:
    """The state of the one finding about ``subject`` that has these words; a fault of it says what mends it."""
    [one] = [one for one in found if one["subject"] == subject and all(word in one["found"] for word in words)]
    assert one["state"] == "ok" or one["mend"]
    return one["state"]


@pytest.fixture
def mounted() -> None:
    """Skips where no view of the machine with other mounts can be made."""
    program = bwrap_program()
    if program is None or subprocess.run([program, "--dev-bind", "/", "/", "true"], capture_output=True).returncode != 0:
        pytest.skip("this machine lets nobody make mounts of their own")


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str, Sequence[str]], None]]:
    """Starts servers, each until its log has words, and ends them."""
    servers = []

    def start(ready: str, command: Sequence[str]) -> None:
        server = ChildProcess(command[0], list(command), tmp_path / f"{len(servers)}.log")
        servers.append(server)
        server.wait_ready(lambda: any(ready in line for line in server.last_lines(50)), ready, 60, pause_s=0.05)

    yield start
    for server in servers:
        server.stop(5)


def test_a_machine_without_faults(tmp_path: Path, myxo: Myxo) -> None:
    found = doctor(["--dir", tmp_path])
    subjects = {one["subject"] for one in found}
    assert {"python", "packages", "torch", "gpus", "shared memory", "nats", "store", "memory", "disk", "open files"} <= subjects
    assert state(found, "nats", "nats-server") == state(found, "store", "Valkey") == state(found, "packages") == "ok"
    code, out, _ = myxo.run("doctor", "--dir", tmp_path)
    assert (code, out.splitlines()[-1]) == (0, "Nothing is wrong.")


def test_flags_need_a_config(myxo: Myxo) -> None:
    code, _, err = myxo.run("doctor", "--colocate")
    assert code == 2
    assert "CONFIG" in err


def test_a_configs_faults(tmp_path: Path, config_file: Callable[..., Path]) -> None:
    path = config_file()
    assert state(doctor([path, "--dir", tmp_path]), "config") == "ok"
    found = doctor([path, "--dir", tmp_path, "--prompt-data", "/nowhere.jsonl"])
    assert state(found, "config", "prompt_data", "/nowhere.jsonl") == "fault"


def test_faults_of_packages_limits_directories_and_drivers(tmp_path: Path, mounted: None) -> None:
    old = tmp_path / "packages" / "msgpack-0.1.dist-info"
    old.mkdir(parents=True)
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: msgpack\nVersion: 0.1\n")
    runs = tmp_path / "runs"
    runs.mkdir()
    mounts = ["--dev", "/dev", "--dev-bind", "/dev/null", "/dev/nvidia0", "--ro-bind", runs, runs, "--dev-bind", "/dev/null", nats_binary()]
    environment = {"PYTHONPATH": str(old.parent), "PATH": "/nowhere"}
    found = doctor(["--dir", runs], mounts, environment, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)))
    assert state(found, "packages", "msgpack 0.1", ">=1.1") == "fault"
    assert state(found, "nats", "nats-server is not installed") == "fault"
    assert state(found, "disk", str(runs), "cannot be written") == "fault"
    assert state(found, "open files", "256") == "fault"
    assert state(found, "gpus", "nvidia-smi is not on PATH") == "fault"


def test_faults_of_memory_disk_and_namespaces(tmp_path: Path, mounted: None) -> None:
    small, cache = tmp_path / "small", tmp_path / "cache"
    small.mkdir()
    cache.mkdir()
    shared_memory = ["--size", str(1 << 20), "--tmpfs", "/dev/shm"]
    disk = ["--size", str(8 << 20), "--tmpfs", small, "--ro-bind", cache, cache]
    found = doctor(["--dir", small], [*shared_memory, *disk, "--unshare-user", "--disable-userns"], {"HF_HUB_CACHE": str(cache)})
    assert state(found, "shared memory", "1 MiB") == "fault"
    assert state(found, "disk", "too few for any run") == "fault"
    assert state(found, "model cache", str(cache)) == "fault"
    assert state(found, "sandbox") == "note"


@pytest.mark.parametrize("errors", [pytest.param("0", marks=pytest.mark.extra), "3"])
def test_faults_of_gpus(tmp_path: Path, mounted: None, errors: str) -> None:
    """A GPU as the driver and a build of torch for it tell; there is none here."""
    packages = tmp_path / "packages"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "__init__.py").touch()
    cuda = "'13.0'" if errors == "0" else "None"
    (packages / "torch" / "version.py").write_text(f"cuda: Optional[str] = {cuda}\n")
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI.format(errors=errors))
    program.chmod(0o755)
    environment = {"PYTHONPATH": str(packages), "PATH": f"{program.parent}:{os.environ['PATH']}"}
    found = doctor(["--dir", tmp_path], ["--dev", "/dev", "--dev-bind", "/dev/null", "/dev/nvidia0"], environment)
    if errors == "0":
        assert state(found, "gpus", "39.1 GiB are in use by others") == "note"
        assert state(found, "driver", "470.10", "13.0", "580") == "fault"
    else:
        assert state(found, "gpus", "3 memory errors") == "fault"
        assert state(found, "torch", "CPUs alone", "1 GPUs") == "fault"


def test_servers_that_do_not_answer(tmp_path: Path) -> None:
    port = free_port()
    found = doctor(
        ["--dir", tmp_path], environment={"NATS_URL": f"nats://u:secret@127.0.0.1:{port}", "REDIS_URL": f"redis://127.0.0.1:{port}"}
    )
    assert state(found, "nats", "NATS_URL", str(port)) == state(found, "store", "REDIS_URL", str(port)) == "fault"
    assert "secret" not in json.dumps(found)


def test_servers_that_would_lose_samples(tmp_path: Path, started: Callable[[str, Sequence[str]], None]) -> None:
    bus, store = free_port(), free_port()
    started("Server is ready", [str(nats_binary()), "-a", "127.0.0.1", "-p", str(bus)])
    settings = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--maxmemory-policy", "allkeys-lru", "--dir", str(tmp_path)]
    started("Ready to accept connections", [str(valkey_binary()), "--port", str(store), *settings])
    found = doctor(["--dir", tmp_path], environment={"NATS_URL": f"nats://127.0.0.1:{bus}", "REDIS_URL": f"redis://127.0.0.1:{store}"})
    assert state(found, "nats", "JetStream") == "fault"
    assert state(found, "store", "allkeys-lru") == "fault"
    assert state(found, "store", "append-only") == "note"
