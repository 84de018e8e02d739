"""Versions of the weights through a real object store: what is sent, what is taken, and what happens to either when something breaks."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from services.trainer.weights.snapshot_writer import WeightCheckpointWriter
from shared.runtime.errors import ConfigError, DeadlineExceeded
from shared.store import s3
from shared.store.s3 import ObjectStoreCredentials, ObjectStoreLocation, S3Client
from shared.transfer.object_weights import LEAST_OBJECT, ObjectMirror, ObjectPublisher, PublishedIndex
from shared.transfer.weight_checkpoint import BrokenCheckpoint, LocalCheckpoint, VersionId, WeightCheckpoint, WeightCheckpoints
from tests.support.object_store import READER, TRAINER, RunningObjectStore
from tests.support.tables import table

SECONDS = 60.0
ELEMENTS = 9 * LEAST_OBJECT // 4  # of two bytes: four and a half chunks


class Training:
    """A trainer's directory of snapshots: each version changes 1 % of the elements of a tensor in bfloat16, every third one is whole."""

    def __init__(self, directory: Path, client: S3Client) -> None:
        self.checkpoints, self._bridges = WeightCheckpoints(directory / "weights"), WeightCheckpoints(directory / "bridges")
        self._current, self._random = LocalCheckpoint(directory / "current"), np.random.default_rng(7)
        self.weights = self._random.integers(0, 1 << 16, ELEMENTS, np.uint16)
        self.publisher = ObjectPublisher(client, 4, SECONDS)
        self.published: list[tuple[WeightCheckpoint, PublishedIndex]] = []

    def step(self) -> tuple[WeightCheckpoint, PublishedIndex]:
        version, whole = len(self.published), len(self.published) % 3 == 0
        self.weights[self._random.integers(0, ELEMENTS, ELEMENTS // 200)] ^= 1
        base = self._current if version else None
        places = [(self._bridges, base)] if whole and version else []
        for checkpoints, on in [*places, (self.checkpoints, None if whole else base)]:
            flat = self.weights.view(np.uint8).copy()
            written = WeightCheckpointWriter(checkpoints, version, on).add({"w": ("bfloat16", (ELEMENTS,), flat)}).publish()
        if not version:
            self._current.copy_from(written)
        self.checkpoints.retain(2)
        self._bridges.remove_before(min(self.checkpoints.versions()))
        self.published.append((written, self.publish()))
        return self.published[-1]

    def publish(self, *, again: bool = False) -> PublishedIndex:
        return self.publisher.publish([*self.checkpoints.readable(), *self._bridges.readable()], again=again)


class Replica:
    """A replica's mirror and its copy."""

    def __init__(self, directory: Path, site: Path, client: S3Client) -> None:
        self.mirror, self.copy = ObjectMirror(site, self._sign, 4, SECONDS), LocalCheckpoint(directory)
        self._client = client

    def _sign(self, _: str, name: str) -> str:
        return self._client.url(name, 60)

    def take(self, written: WeightCheckpoint, index: PublishedIndex) -> list[WeightCheckpoint]:
        held = self.copy.held()
        chain = self.mirror.pull(index.name, index.bytes, written.id, None if held is None else held.id)
        if (last := self.copy.follow_chain(chain)) is chain[-1]:
            self.copy.copy_from(last)
        held = self.copy.held()
        assert held is not None and held.id == written.id
        return chain


@pytest.fixture
def training(tmp_path: Path, object_store: RunningObjectStore, run_name: str) -> Training:
    return Training(tmp_path / "trainer", object_store.client(run_name))


def test_replicas_of_a_site_take_each_version_once_and_never_a_whole_one_that_they_do_not_need(training: Training, tmp_path: Path) -> None:
    client, whole = training.publisher.client, 2 * ELEMENTS
    site = [Replica(tmp_path / name, tmp_path / "site", client) for name in ("one", "two")]
    for version in range(8):
        training.step()
        with ThreadPoolExecutor(2) as threads:
            chains = list(threads.map(lambda replica: replica.take(*training.published[-1]), site))
        assert [[part.kind for part in chain] for chain in chains] == [["full" if version == 0 else "delta"]] * 2
    files, indices = sum(replica.mirror.received for replica in site), 2 * sum(index.bytes for _, index in training.published)
    assert whole < files - indices < 1.5 * whole  # one whole version and seven deltas, once for both
    late = Replica(tmp_path / "late", tmp_path / "elsewhere", client)
    assert [(part.version, part.kind) for part in late.take(*training.published[-1])] == [(6, "full"), (7, "delta")]
    behind = Replica(tmp_path / "behind", tmp_path / "third", client)
    behind.take(*training.published[-1])
    newest = [training.step() for _ in range(2)][-1]
    assert [(part.version, part.kind) for part in behind.take(*newest)] == [(8, "delta"), (9, "delta")]

    objects, followed = set(client.listed()), training.published[-3][1].name
    training.publisher.collect({followed})
    assert training.publisher.indices.keys() == {followed, newest[1].name}
    assert set(client.listed()) == set().union(*training.publisher.indices.values()) < objects
    assert training.publisher.collect(set()) > 0
    late.take(*newest)  # all that the newest needs is there


def test_a_replica_removes_what_nobody_of_its_site_uses_any_more(training: Training, tmp_path: Path) -> None:
    """One that is behind keeps what it reads, and removes nothing newer; a draft that nobody continues goes with its version."""
    site, client = tmp_path / "site", training.publisher.client
    ahead, behind = Replica(tmp_path / "ahead", site, client), Replica(tmp_path / "behind", site, client)
    for _ in range(3):
        training.step()
    (written, index), whole = training.published[-1], site / "full" / "v000000"
    draft = whole.with_name(f".v000001.{'0' * 16}.partial")
    chain = behind.mirror.pull(index.name, index.bytes, written.id, None)
    draft.mkdir()
    for _ in range(2):
        newest = training.step()
    ahead.take(*newest)
    assert all(part.path.is_dir() for part in chain) and not draft.exists()
    there = {path.name for path in site.glob("*/v*")}
    assert behind.mirror.pull(index.name, index.bytes, written.id, None) == chain
    assert {path.name for path in site.glob("*/v*")} == there >= {"v000000", "v000004"}
    behind.take(*newest)
    assert not whole.exists() and whole.with_name(".v000000.lock").exists() and not list(site.glob("*/.v000000.used"))


@pytest.mark.extra
def test_an_upload_has_time_as_long_as_it_flows(monkeypatch: pytest.MonkeyPatch) -> None:
    received = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        head, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
        size, slow = len(body), time.monotonic() + 1.5
        while size < 32 << 20:
            size += len(connection.recv(1 << 16))
            time.sleep(0.01 if time.monotonic() < slow else 0.0)
        received.append((b"Content-Length: %d" % size in head, size))
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    monkeypatch.setattr(s3, "SOCKET_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/bucket"
        S3Client(ObjectStoreLocation.parse(url, "us-east-1"), TRAINER).put("object", bytes(32 << 20), 0.1)
    assert received == [(True, 32 << 20)]


def test_what_is_damaged_in_the_store_is_found_and_mended_by_another_upload(training: Training, tmp_path: Path) -> None:
    client, replica = training.publisher.client, Replica(tmp_path / "copy", tmp_path / "site", training.publisher.client)
    written, index = training.step()
    [damaged, *_] = sorted(training.publisher.indices[index.name] - {index.name})
    client.put(damaged, b"?" * LEAST_OBJECT, SECONDS)
    with pytest.raises(BrokenCheckpoint, match=f"object {damaged} is not what it is called after"):
        replica.take(written, index)
    client.remove(damaged)
    with pytest.raises(BrokenCheckpoint, match=f"holds no .*{damaged}"):
        replica.take(written, index)
    taken = replica.mirror.received
    assert training.publish(again=True).name == index.name
    replica.take(written, index)
    assert replica.mirror.received - taken <= LEAST_OBJECT + index.bytes  # the other chunks had come before
    with pytest.raises(BrokenCheckpoint, match="announced as '../x'"):
        replica.mirror.pull("../x", 10, written.id, None)
    with pytest.raises(BrokenCheckpoint, match="no whole checkpoint"):
        replica.mirror.pull(index.name, index.bytes, VersionId(9, "other"), None)


class Breaking(threading.Thread):
    """A server between clients and the store that breaks each of its first connections after so many bytes of the answer."""

    def __init__(self, url: str, breaks: list[int]) -> None:
        super().__init__(daemon=True)
        host, port = url.split("/")[2].split(":")
        self._server, self._breaks, self._listener = (host, int(port)), list(breaks), socket.create_server(("127.0.0.1", 0))
        self.url = url.replace(f"{host}:{port}", f"127.0.0.1:{self._listener.getsockname()[1]}")
        self.ranges: list[bytes] = []

    def run(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._server) as server:
            request = client.recv(1 << 16)
            self.ranges += [line for line in request.split(b"\r\n") if line.startswith(b"Range")]
            server.sendall(request)
            left = self._breaks.pop(0) if self._breaks else 1 << 40
            while left > 0 and (data := server.recv(min(left, 1 << 16))):
                client.sendall(data)
                left -= len(data)


def test_a_download_continues_where_its_connection_broke(training: Training, object_store: RunningObjectStore) -> None:
    written, _ = training.step()
    name = max(training.publisher.indices.values(), key=len)
    stored = next(iter(training.publisher._described.values())).files[written.tensor_files()[0].name]
    breaking = Breaking(training.publisher.client.location.endpoint, [300_000, 500_000, 10])
    breaking.start()
    location = replace(training.publisher.client.location, endpoint=breaking.url)
    client = S3Client(location, TRAINER)
    assert stored.chunks[0] in name
    data = s3.download(lambda: client.url(stored.chunks[0], 60), LEAST_OBJECT, stored.chunks[0], SECONDS)
    assert len(data) == LEAST_OBJECT and len(breaking.ranges) == 3 and breaking.ranges[0] != breaking.ranges[1] == breaking.ranges[2]


@pytest.mark.extra
def test_a_store_that_is_down_is_waited_for_and_named(training: Training, object_store: RunningObjectStore, tmp_path: Path) -> None:
    written, index = training.step()
    object_store.kill()
    with pytest.raises(DeadlineExceeded, match=r"object .* did not come from the object store within 1 s"):
        s3.download(lambda: training.publisher.client.url(index.name, 60), index.bytes, index.name, 1.0)
    with ThreadPoolExecutor(1) as thread:
        taking = thread.submit(Replica(tmp_path / "copy", tmp_path / "site", training.publisher.client).take, written, index)
        object_store.start()
        assert taking.result()


@table("skew", [-120.0, 120.0, -3600.0, 3600.0])
def test_a_clock_that_is_off_signs_urls_that_hold(skew: float, object_store: RunningObjectStore) -> None:
    client = S3Client(ObjectStoreLocation.parse(f"{object_store.url}/skew", "us-east-1"), TRAINER, lambda: time.time() + skew)
    client.probe()
    content = b"x" * 100
    client.put("probe", content, SECONDS)
    name = s3.blake3(content).hexdigest()
    assert s3.download(lambda: client.url("probe", 10), 100, name, 5.0) == content


@table(
    ("url", "credentials", "field", "expected"),
    [
        ("/absent-bucket", TRAINER, s3.FIELD, "the store knows no bucket"),
        ("", READER, s3.FIELD, "has s3:PutObject, s3:GetObject"),
        ("", replace(TRAINER, secret="wrong"), s3.KEY_VARIABLE, "SignatureDoesNotMatch"),
        ("", ObjectStoreCredentials("nobody", "x"), s3.KEY_VARIABLE, "InvalidAccessKeyId"),
    ],
)
def test_wrong_settings_are_named_by_their_field(
    url: str, credentials: ObjectStoreCredentials, field: str, expected: str, object_store: RunningObjectStore
) -> None:
    location = ObjectStoreLocation.parse(object_store.url.rpartition("/")[0] + url if url else object_store.url, "us-east-1")
    with pytest.raises(ConfigError, match=expected) as refused:
        S3Client(location, credentials).probe()
    assert refused.value.field == field


@pytest.fixture
def answering() -> Iterator[list[tuple[int, str]]]:
    """Answers of a server, to be filled in; each request gets the first."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    answers: list[tuple[int, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            status, body = answers[0]
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    answers.append((server.server_port, ""))
    yield answers
    server.shutdown()


@table(
    ("status", "code", "field", "expected"),
    [
        (400, "AuthorizationHeaderMalformed", s3.REGION_FIELD, "which is eu-west-9"),
        (403, "QuotaExceeded", s3.FIELD, "a bucket with room"),
        (507, "XMinioStorageFull", s3.FIELD, "a bucket with room"),
        (403, "RequestTimeTooSkewed", s3.FIELD, "clock"),
        (405, "MethodNotAllowed", s3.FIELD, "speaks S3's API"),
    ],
)
def test_what_other_stores_say_is_named_by_its_field(
    status: int, code: str, field: str, expected: str, answering: list[tuple[int, str]]
) -> None:
    """Errors of which SeaweedFS has none: they are written as AWS and MinIO write them."""
    port = answering[-1][0]
    answering.insert(0, (status, f"<Error><Code>{code}</Code><Message>m</Message><Region>eu-west-9</Region></Error>"))
    with pytest.raises(ConfigError, match=expected) as refused:
        S3Client(ObjectStoreLocation.parse(f"http://127.0.0.1:{port}/bucket", "us-east-1"), TRAINER).probe()
    assert refused.value.field == field
