"""Versions on disk: chains, what breaks them, what is kept, and that nobody ever sees half of one."""

import datetime
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from torch.distributed import TCPStore

from services.trainer.weights.snapshot_writer import WeightCheckpointWriter
from shared.runtime.errors import BadMessage
from shared.schema.weight_messages import WeightChannelAddress
from shared.transfer import weight_checkpoint
from shared.transfer.digest import TensorDigest, of_bytes, version_digest
from shared.transfer.group_channel import BroadcastGroup
from shared.transfer.weight_checkpoint import (
    CHECKPOINT_FILE,
    BrokenCheckpoint,
    DeltaEncoding,
    LocalCheckpoint,
    WeightCheckpoint,
    WeightCheckpoints,
    apply_delta,
    encode_delta,
)
from tests.support.small_disk import small_disk
from tests.support.tables import table

Weights = dict[str, np.ndarray]


def weights(version: int, names: int = 5) -> Weights:
    """Each version differs from the one before in some elements of some tensors."""
    random = np.random.default_rng(0)
    made = {f"layer.{number}.weight": random.standard_normal((6, 8)).astype(np.float32) for number in range(names)}
    for step in range(1, version + 1):
        for name in list(made)[step % names :]:
            made[name].reshape(-1)[step : step + 9] += np.float32(1e-6 * step)
    return made


def write(
    snapshots: WeightCheckpoints,
    version: int,
    base: LocalCheckpoint | None = None,
    encoding: DeltaEncoding = "xor",
    found: Weights | None = None,
) -> WeightCheckpoint:
    """A checkpoint as a trainer writes it, in two buckets."""
    draft = WeightCheckpointWriter(snapshots, version, base, encoding)
    tensors = {name: ("float32", array.shape, array.reshape(-1).view(np.uint8)) for name, array in (found or weights(version)).items()}
    for part in (list(tensors)[:3], list(tensors)[3:]):
        draft.add({name: tensors[name] for name in part})
    return draft.publish(lambda path: (path / "config.json").write_text("{}\n") and None)


def history(root: Path, kinds: str, encoding: DeltaEncoding = "xor") -> WeightCheckpoints:
    """Versions 0, 1, …, each full (``f``) or a delta (``d``)."""
    snapshots, current = WeightCheckpoints(root), LocalCheckpoint(root / ".current")
    for version, kind in enumerate(kinds):
        if kind == "f":
            current.copy_from(write(snapshots, version))
        else:
            write(snapshots, version, current, encoding)
    return snapshots


def loaded(path: Path) -> Weights:
    return {name: array for file in path.glob("*.safetensors") for name, array in load_file(file).items()}


def same(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(found[name].tobytes() == array.tobytes() for name, array in expected.items())


def test_a_full_checkpoint_is_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = write(WeightCheckpoints(tmp_path), 12)
    assert checkpoint.path == tmp_path / "v000012" and same(loaded(checkpoint.path), weights(12))
    assert {path.name for path in checkpoint.path.iterdir()} == {
        "config.json", CHECKPOINT_FILE, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    }  # fmt: skip
    known = {name: TensorDigest("float32", array.shape, of_bytes(array.tobytes())) for name, array in weights(12).items()}
    assert checkpoint.digest == version_digest(known) and checkpoint.kind == "full"
    assert LocalCheckpoint(tmp_path / "cache").follow(WeightCheckpoints(tmp_path), 12) == checkpoint  # nothing to copy


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_chain_gives_every_version_bit_for_bit(encoding: DeltaEncoding, tmp_path: Path) -> None:
    snapshots = history(tmp_path / "w", "fdddfd", encoding)
    assert [[checkpoint.version for checkpoint in snapshots.chain(version)] for version in (3, 4, 5)] == [[0, 1, 2, 3], [4], [4, 5]]
    assert [checkpoint.kind for checkpoint in snapshots.chain(3)] == ["full", "delta", "delta", "delta"]
    cache = LocalCheckpoint(tmp_path / "cache")
    for version in (1, 3, 5, 2):  # a first one, over a gap, onto another full one, back
        checkpoint = cache.follow(snapshots, version)
        assert same(loaded(checkpoint.path), weights(version)) and checkpoint.digest == snapshots.load(version).digest
        assert (checkpoint.path / "config.json").exists()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["v000002"]


def test_a_delta_holds_what_changed_alone(tmp_path: Path) -> None:
    snapshots = history(tmp_path, "fd")
    changed = {name.partition("/")[2] for file in snapshots.load(1).tensor_files() for name in load_file(file)}
    before, after = weights(0), weights(1)
    assert changed == {name for name in after if not np.array_equal(before[name], after[name])} != set(after)
    write(snapshots, 2, LocalCheckpoint(tmp_path / ".current"), found=weights(1))  # nothing changed
    assert snapshots.load(2).tensor_files() == [] and snapshots.load(2).digest == snapshots.load(1).digest
    assert same(loaded(LocalCheckpoint(tmp_path / "cache").follow(snapshots, 2).path), weights(1))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def delta(path: Path) -> Path:
    return min(path.glob("delta*"))


DAMAGE = {
    "a delta's bytes": (1, lambda path: flip(delta(path)), r"v000001: delta.* is altered"),
    "a torn delta": (1, lambda path: cut(delta(path)), r"v000001: delta.* bytes, not"),
    "a delta's file": (1, lambda path: delta(path).unlink(), r"v000001: delta.*No such file"),
    "a delta's checkpoint.json": (
        1,
        lambda path: cut(path / CHECKPOINT_FILE) or (path / CHECKPOINT_FILE).write_text("{"),
        r"v000001: its checkpoint.json",
    ),
    "a missing delta": (1, shutil.rmtree, r"version 1 .*it is missing"),
    "a full checkpoint's bytes": (0, lambda path: flip(min(path.glob("model*.safetensors"))), r"v000000: model.* is altered"),
    "a full checkpoint's config": (0, lambda path: flip(path / "config.json"), r"v000000: config.json is altered"),
    "another base": (
        0,
        lambda path: write(WeightCheckpoints(path.parent), 0, found=weights(3)),
        r"v000000: version 1 lies on another version 0",
    ),
}


@table("what", DAMAGE)
def test_damage_is_found_and_named_and_a_full_checkpoint_mends_it(what: str, tmp_path: Path) -> None:
    version, damage, message = DAMAGE[what]
    snapshots = history(tmp_path / "w", "fdd")
    damage(snapshots.path_of(version))
    cache = LocalCheckpoint(tmp_path / "cache")
    with pytest.raises(BrokenCheckpoint, match=message) as raised:
        cache.follow(snapshots, 2)
    assert raised.value.version == version
    write(snapshots, 2)
    assert same(loaded(cache.follow(snapshots, 2).path), weights(2))


def test_a_delta_that_lies_about_what_it_makes(tmp_path: Path) -> None:
    """Sums that fit the files prove nothing: what was made is what counts."""
    snapshots = history(tmp_path / "w", "fd")
    honest = snapshots.load(1)
    for tensors in (honest.tensors | {"layer.4.weight": TensorDigest("float32", (6, 8), 1)}, dict(list(honest.tensors.items())[1:])):
        honest.model_copy(update={"tensors": tensors, "digest": version_digest(tensors)}).save()
        cache = LocalCheckpoint(tmp_path / "cache")
        with pytest.raises(BrokenCheckpoint, match=r"v000001: (layer.4.weight laid over its base|it has no change of layer.0)"):
            cache.follow(snapshots, 1)
        assert cache.held() is None and not list((tmp_path).glob("cache/*"))


@table(
    "fields",
    [
        '{"version": 3, "format": 1}',
        "[]",
        '{"version": 7}',
        "\xff",
        "{}",
        '{"version": 3, "digest": "99aa06d3014798d86001c324468d497f", "tensors": {}, "files": {"../x": [0, ""]}}',
        '{"version": 3, "digest": "99aa06d3014798d86001c324468d497e", "tensors": {}, "files": {}}',
    ],
)
def test_a_foreign_description_is_named(fields: str, tmp_path: Path) -> None:
    (tmp_path / "v000003").mkdir()
    (tmp_path / "v000003" / CHECKPOINT_FILE).write_bytes(fields.encode("latin-1"))
    (tmp_path / "notes").mkdir()
    snapshots = WeightCheckpoints(tmp_path)
    assert snapshots.versions() == [3] and snapshots.newest() is None
    with pytest.raises(BrokenCheckpoint, match=r"version 3 cannot be had from .*v000003: its checkpoint.json cannot be read"):
        snapshots.chain(3)
    assert snapshots.retain(1) == [] and snapshots.path_of(3).is_dir()


def test_a_full_disk_of_the_copy_is_no_damage_of_the_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots, full = history(tmp_path / "w", "fd"), OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(shutil, "copyfileobj", Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left") as raised:
        LocalCheckpoint(tmp_path / "cache").follow(snapshots, 1)
    assert raised.value is full


def test_a_copy_that_somebody_removed_is_no_damage_of_the_snapshot(tmp_path: Path) -> None:
    snapshots, cache = history(tmp_path / "w", "fdd"), LocalCheckpoint(tmp_path / "cache")
    shutil.rmtree(cache.follow(snapshots, 1).path)
    with pytest.raises(FileNotFoundError):
        cache.follow(snapshots, 2)
    assert same(loaded(cache.follow(snapshots, 2).path), weights(2))


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    snapshots = history(tmp_path / "w", "fd")
    flip(min(LocalCheckpoint(tmp_path / "cache").follow(snapshots, 1).path.glob("model*.safetensors")))
    again = LocalCheckpoint(tmp_path / "cache")
    assert again.held() is None
    assert same(loaded(again.follow(snapshots, 1).path), weights(1))


def test_what_newer_versions_are_made_of_is_kept(tmp_path: Path) -> None:
    snapshots = history(tmp_path, "fddfdd")
    assert snapshots.retain(2) == [2, 1, 0] and snapshots.versions() == [3, 4, 5]
    assert snapshots.retain(1) == [] and [checkpoint.version for checkpoint in snapshots.chain(5)] == [3, 4, 5]
    write(snapshots, 6)
    shutil.rmtree(snapshots.path_of(4))
    assert snapshots.retain(2) == []  # version 5 cannot be made: nobody can tell of what
    assert snapshots.retain(1) == [5, 3] and snapshots.versions() == [6]


def test_versions_of_a_life_that_is_over_go(tmp_path: Path) -> None:
    snapshots = history(tmp_path, "fdfd")
    assert snapshots.remove_after(1) == [2, 3] and snapshots.versions() == [0, 1]


def test_a_base_without_a_tensor_is_refused(tmp_path: Path) -> None:
    snapshots, current = history(tmp_path, "f"), LocalCheckpoint(tmp_path / ".current")
    draft = WeightCheckpointWriter(snapshots, 1, current)
    extra = np.zeros(4, np.uint8)
    with pytest.raises(BrokenCheckpoint, match=r"another is not in version 0"):
        draft.add({"another": ("float32", (1,), extra)})
    draft.discard()
    assert snapshots.versions() == [0] and LocalCheckpoint(tmp_path / ".current").held() is None
    current.copy_from(snapshots.load(0))
    with pytest.raises(BrokenCheckpoint, match=r"layer.0.weight has not come"):
        WeightCheckpointWriter(snapshots, 1, current).publish()


KILLED = """
import os, signal, sys
from pathlib import Path
from shared.transfer.weight_checkpoint import WeightCheckpoints
from shared.transfer.weight_checkpoint import LocalCheckpoint
from tests.unit.shared.weights import test_weight_checkpoints as t
import shared.runtime.safe_files, services.trainer.weights.snapshot_writer as d
step = count = 0
def counted(original):
    def call(*arguments, **named):
        global count
        count += 1
        if count == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **named)
    return call
d.tensor_file.write, d.fsync_tree = counted(d.tensor_file.write), counted(d.fsync_tree)
d.FileSum.read = counted(d.FileSum.read)
Path.rename = counted(Path.rename)
for place in map(Path, sys.argv[1:]):
    step = int(place.name)
    if (child := os.fork()) == 0:
        t.write(WeightCheckpoints(place), 2, LocalCheckpoint(place / ".current"))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL, step
"""


def test_a_writer_that_is_killed_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """At each of these steps of its write; each is killed in a fork of one process, which imports torch once."""
    killed = {tmp_path / str(step): history(tmp_path / str(step), "fd") for step in (1, 2, 4, 6, 8)}
    source = Path(__file__).parents[4]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    subprocess.run([sys.executable, "-c", KILLED, *map(str, killed)], cwd=source, env=environment, check=True)
    for place, snapshots in killed.items():
        assert snapshots.versions() in ([0, 1], [0, 1, 2]), place.name
        newest = snapshots.newest()
        assert newest is not None
        cache = LocalCheckpoint(place / "cache")
        assert same(loaded(cache.follow(snapshots, newest.version).path), weights(newest.version))
        snapshots.sweep()
        current = LocalCheckpoint(place / ".current").held()
        assert current is None or current.digest in (snapshots.load(1).digest, newest.digest)
        assert {path.name for path in place.iterdir()} <= {"v000000", "v000001", "v000002", ".current", "cache"}


def hide_in(path: Path, kind: str) -> None:
    """Does to a version's directory what another account could."""
    config, elsewhere = path / "config.json", path.parent / "elsewhere"
    described = path / CHECKPOINT_FILE
    if kind == "linked file":
        shutil.move(config, elsewhere)
        config.symlink_to(elsewhere)
    elif kind == "linked description":
        shutil.move(described, elsewhere)
        described.symlink_to(elsewhere)
    elif kind == "linked directory":
        shutil.move(path, elsewhere)
        path.symlink_to(elsewhere)
    elif kind == "pipe":
        config.unlink()
        os.mkfifo(config)
    elif kind == "described by a pipe":
        described.unlink()
        os.mkfifo(described)
    elif kind == "more weights":
        shutil.copy(path / "model-00001-of-00002.safetensors", path / "other.safetensors")
    elif kind == "weights to unpickle":
        (path / "pytorch_model.bin").write_bytes(b"")
    elif kind == "nested":
        described.write_text('{"version": 1, "tensors": ' + "[" * 100_000)
    else:
        fields = json.loads(described.read_text())
        files = {
            "a file above": {"..": [4096, "0" * 32]},
            "a file elsewhere": {"/etc/hostname": [1, "0" * 32]},
            "a name with NUL": {"config.json\0": [3, "0" * 32]},
            "a name with an escape": {"\x1b[2J": [3, "0" * 32]},
            "a name of no character": {"\ud800": [3, "0" * 32]},
        }
        described.write_text(json.dumps(fields | {"files": fields["files"] | files[kind]}))


@table("kind", [
        "linked file", "linked description", "linked directory", "pipe", "described by a pipe", "more weights", "weights to unpickle",
        "nested", "a file above", "a file elsewhere", "a name with NUL", "a name with an escape", "a name of no character",
    ])  # fmt: skip
def test_what_another_account_hides_in_a_version_makes_it_broken(kind: str, tmp_path: Path) -> None:
    snapshots = history(tmp_path, "ff")
    hide_in(snapshots.path_of(1), kind)
    replica = LocalCheckpoint(tmp_path / "cache")
    with pytest.raises(BrokenCheckpoint) as error:
        replica.follow(snapshots, 1)
    assert error.value.version == 1 and error.value.path == snapshots.path_of(1)
    assert replica.follow(snapshots, 0).version == 0  # the others are as good as before


def test_an_engines_own_group_gets_tensors_as_it_is_asked_for_them(tmp_path: Path) -> None:
    """A pair that engines load as one is asked for together, wherever its halves stand in the file."""
    names = [f"model.layers.0.self_attn.{name}.weight" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa")]
    held = {name: np.full((6, 8), index, np.float32) for index, name in enumerate(names)}
    sent = write(WeightCheckpoints(tmp_path), 0, found=held)
    place = {"backend": "gloo", "world_size": 2}
    settings = {**place, "checkpoint": str(sent.path), "master_address": "127.0.0.1", "group_name": "own", "seconds": 60}
    command = [sys.executable, "-m", "shared.transfer.group_channel"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdin is not None and sender.stdout is not None
        print(json.dumps(settings), file=sender.stdin, flush=True)
        port = int(sender.stdout.readline())
        store = TCPStore("127.0.0.1", port, 2, False, datetime.timedelta(seconds=60), wait_for_workers=False)
        address = {**place, "kind": "group", "address": "127.0.0.1", "port": port, "name": "own", "secret": "0" * 32}
        group = BroadcastGroup(WeightChannelAddress.model_validate(address), store, 1, torch.device("cpu"), 60, stock=True)
        for slot in sent.manifest(1 << 20).slots():
            group.broadcast(taken := torch.empty(slot.shape), 60).wait()
            assert torch.equal(taken, torch.from_numpy(held[slot.name])), slot.name
        sender.communicate(timeout=60)


@pytest.mark.parametrize("name", ["v" + "9" * 40, "v\u0661\u0662\u0663\u0664\u0665\u0666", "v-00001"])
def test_directories_that_are_called_like_no_version_do_not_count(name: str, tmp_path: Path) -> None:
    snapshots = history(tmp_path, "f")
    shutil.copytree(snapshots.path_of(0), tmp_path / name)
    assert snapshots.versions() == [0]


@pytest.mark.parametrize("kinds", ["f", "fd"])
def test_a_full_disk_costs_a_version_and_leaves_those_before_it_whole(tmp_path: Path, kinds: str) -> None:
    with small_disk(tmp_path / "disk", "8m") as disk:
        snapshots = history(disk.path / "weights", kinds)
        newest = len(kinds) - 1
        disk.fill(free=64 << 10)
        large = {"layer.0.weight": np.ones((512, 512), np.float32)}
        with pytest.raises(OSError, match="No space left"):
            write(snapshots, newest + 1, found=large)
        found = snapshots.newest()
        assert found is not None and found.version == newest
        for checkpoint in snapshots.chain(newest):
            checkpoint.check_files(contents=True)
        disk.clear()
        write(snapshots, newest + 1, found=large)
        found = snapshots.newest()
        assert found is not None and found.version == newest + 1


# --- a tensor's change between two versions: small, and bit-equal when laid over the older one

ENCODINGS = pytest.mark.parametrize("encoding", ["xor", "overwrite", "magnitude", "auto"])


MAGNITUDE = encode_delta(np.zeros(4, np.uint8), np.ones(4, np.uint8), 4, "magnitude")


def bf16(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray((values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)).view(np.uint8)


@ENCODINGS
@given(data=st.data(), item=st.sampled_from([1, 2, 4, 8]), length=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_any_bits_come_back(encoding: weight_checkpoint.DeltaEncoding, data: st.DataObject, item: int, length: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, length * item, dtype=np.uint8)
    new = old.copy()
    for place in data.draw(st.lists(st.integers(0, length * item - 1), max_size=6)):
        new[place] = random.integers(0, 256)
    parts, target = encode_delta(old, new, item, encoding), old.copy()
    if parts:
        apply_delta(target, parts, item)
    assert np.array_equal(target, new) and bool(parts) == (not np.array_equal(old, new))


@ENCODINGS
def test_tensors_of_several_chunks(encoding: weight_checkpoint.DeltaEncoding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_checkpoint, "CHUNK_BYTES", 64)
    monkeypatch.setattr(weight_checkpoint, "BLOCK", 5)
    random = np.random.default_rng(0)
    old = random.integers(0, 256, 1000, dtype=np.uint8)
    new = np.where(random.random(1000) < 0.1, random.integers(0, 256, 1000), old).astype(np.uint8)
    target = old.copy()
    apply_delta(target, encode_delta(old, new, 4, encoding), 4)
    assert np.array_equal(target, new)


@ENCODINGS
def test_a_small_step_of_bfloat16_is_a_small_change(encoding: weight_checkpoint.DeltaEncoding) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal(200_000) * 0.02
    old, new = bf16(weights), bf16(weights + 1e-6 * random.choice([-1, 1], len(weights)))
    parts = encode_delta(old, new, 2, encoding)
    most = 0.08 if encoding in ("xor", "overwrite") else 0.025
    assert sum(part.nbytes for part in parts.values()) < most * len(old)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "made of nothing"),
        ({"xor": np.zeros(3, np.uint8)}, "cannot be unpacked"),
        ({"values": np.zeros(3, np.uint8)}, r"made of \['values'\]"),
        (encode_delta(np.zeros(400, np.uint8), np.ones(400, np.uint8), 4, "xor"), "at most 40 fit"),
        (encode_delta(np.zeros(20, np.uint8), np.ones(20, np.uint8), 4, "xor"), "20 bytes for a tensor of 40"),
        (encode_delta(np.zeros(48, np.uint8), np.repeat([0, 1], [44, 4]).astype(np.uint8), 4, "magnitude"), "element 11 of 10"),
        (MAGNITUDE | {"steps": MAGNITUDE["near"]}, "1 bytes of elements of 4"),
        (MAGNITUDE | {"far": encode_delta(np.zeros(8, np.uint8), np.ones(8, np.uint8), 1, "xor")["xor"]}, "1 of 0 long ones"),
        (encode_delta(np.zeros(48, np.uint8), np.repeat([0, 1], [44, 4]).astype(np.uint8), 4, "overwrite"), "element 11 of 10|beyond"),
    ],
)
def test_what_does_not_fit_is_refused(parts: weight_checkpoint.DeltaParts, message: str) -> None:
    with pytest.raises(BadMessage, match=message):
        apply_delta(np.zeros(40, np.uint8), parts, 4)
