"""Values that a taken-over service, an older release or a damaged disk may leave under a key of KV."""

import msgpack

from shared.schema import codec
from shared.schema.messages import Durable
from shared.schema.service_messages import Attempt, LeaseStatus, ServiceStatus
from shared.schema.weight_messages import WeightsLive, WeightsSnapshot

LARGE = 2**31 - 1


def _wrong(kind: str, **fields: object) -> bytes:
    return codec.pack({"schema": 1, "kind": kind, **fields})


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "no UTF-8": b"\xff\xfe\x00\x80 \x1b[2J",
    "a text": b"garbage",
    "JSON null": b"null",
    "a JSON list": b"[1, 2]",
    "JSON of the wrong types": b'{"run": 5, "model": [], "data": null}',
    "a long number": b"9" * 5000,
    "a negative number": b"-1",
    "deep JSON": b'{"run":' * 3000 + b"1" + b"}" * 3000,
    "deep lists": b"[" * 100_000,
    "deep MessagePack": b"\x91" * 5000 + b"\xc0",
    "a MessagePack timestamp": msgpack.packb(msgpack.Timestamp(1, 1)),
    "another message": Durable(steps=1).encode(),
    "another schema": codec.pack({"schema": 999, "kind": "WeightsLive"}),
    "no schema": codec.pack({"kind": "LeaseStatus"}),
    "a lease": LeaseStatus(holder="x", term="x", mark="x", at=1e300).encode(),
    "a free lease": LeaseStatus(holder="", term="", mark="", at=-1.0).encode(),
    "an attempt": Attempt(number=LARGE, address="x", port=1, terms=[], at=0.0).encode(),
    "a status": ServiceStatus(service="trainer", instance="x", host="h", pid=1, http="", state="ready", at=1e300, version=LARGE).encode(),
    "a huge version": WeightsLive(version=LARGE, replicas=["x"], seconds=0.0, bytes=0, at=0.0).encode(),
    "a snapshot": WeightsSnapshot(version=-5, digest="x", form="full", path="/etc", bytes=-1, seconds=0.0, at=1e300).encode(),
    "a version below all": _wrong("WeightsLive", version=-5, replicas=[], seconds=0.0, bytes=0, at=0.0),
    "a version that is no number": _wrong("WeightsLive", version="1", replicas=None, seconds=0.0, bytes=0, at=0.0),
    "a number beyond 64 bits": _wrong("WeightsLive", version=2**64 - 1, replicas=[], seconds=float("nan"), bytes=0, at=0.0),
    "a phase with a long reason": b"running\n" + b"x" * 100_000,
}
