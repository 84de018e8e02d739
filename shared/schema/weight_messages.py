"""The messages about weights: of a push, of GPUs that trainer and replica share, of one replica to another, and what is live or on disk."""

from typing import Literal

from pydantic import Field, FiniteFloat

from shared.schema.message import Count, Name, Reason, Timestamp
from shared.schema.messages import Message, Part

Marks = dict[Name, FiniteFloat]  # What a part of a push has reached → when, in seconds of the monotonic clock of its machine


class WeightChannelAddress(Part):
    """One stream of buckets, from one of the trainer's ranks to every replica of a push.

    ``kind``: ``group``, a process group over ``backend`` (gloo or nccl) in which the source is rank 0; ``memory``, buffers that both sides
    map (`colocate`). ``address``, ``port``: of the source's store, which has manifests and buffers. ``secret``: without it the store
    refuses all; hexadecimal digits. ``name``: the channel's, new whenever it is made. ``world_size``: the source and all engines' ranks.
    """

    kind: Literal["group", "memory"]
    name: str
    address: str
    port: int
    secret: str = Field(pattern=r"^([0-9a-f]{2}){16,64}$", repr=False)
    backend: str
    world_size: int


class WeightsOffer(Message):
    """Trainer asks whether a replica can take ``version`` now, before it builds a group.

    Subject ``<run>.rollout.<replica>.weights.offer``.
    """

    version: int


class WeightsReady(Message):
    """Replica's answer: it holds ``version`` now (-1: none yet) and can take part; to a `WeightsPrepare`: its engine joins the channels.

    ``digest``: of the version that it holds, as its engine knows it; empty where it does not know every tensor's. ``address``: of its
    machine. ``further``: the addresses of its engine's further nodes.
    """

    replica: str
    version: int
    digest: str = ""
    address: str = ""
    further: list[str] = []


class WeightsPrepare(Message):
    """Trainer names the channels that will carry ``version``, and the replica's ``rank`` in all of them, of its engine's first process.

    ``machines``: for an engine over several machines with channels of their own, the addresses of its nodes in order, and the rank of each
    one's first process in those of its machine. The engine joins in the background and continues generating.
    Subject ``<run>.rollout.<replica>.weights.prepare``.
    """

    version: int
    channels: list[WeightChannelAddress] = Field(min_length=1)
    rank: int = Field(ge=1)
    machines: dict[str, int] = {}
    deadline: float = Field(gt=0)


class WeightsReceive(Message):
    """Replica stops generating and takes every bucket of ``version`` from the channels that it has joined.

    ``push``: number of this push in the trainer's life; the channels' stores have its manifests under it. ``manifests``: channel → the id
    of its manifest, as far as the trainer's first rank knows it: a replica that had it from this channel last need not read it again.
    ``check``: compare with what the engine holds instead of loading. Subject ``<run>.rollout.<replica>.weights.receive``.
    """

    version: int
    push: int
    channels: list[str] = Field(min_length=1)
    manifests: dict[str, str] = {}
    check: bool = False
    deadline: float = Field(gt=0)


class WeightsReceived(Message):
    """Replica's answer to a `WeightsReceive`: every bucket has been loaded (or compared).

    ``digest``: of the version, over all tensors that the engine knows (`shared.transfer.digest`). ``bytes``: received. ``seconds``: from
    the first wait for a bucket to the last one's loading. ``differences``: of a check, name of a tensor → elements that differ. ``marks``:
    what was reached → when, in seconds of the replica's monotonic clock.
    """

    digest: str
    bytes: int
    seconds: float
    differences: dict[str, int] = {}
    marks: Marks = {}


class WeightsCommit(Message):
    """Every bucket of ``version`` is loaded: serve it, if its digest is ``digest``.

    Subject ``<run>.rollout.<replica>.weights.commit``.
    """

    version: int
    digest: str
    deadline: float = Field(gt=0)


class WeightsServed(Message):
    """Replica's answer to a `WeightsCommit`: it serves the version. ``paused``: seconds in which it generated nothing for this push;
    ``marks``: as in `WeightsReceived`."""

    paused: float = Field(ge=0)
    marks: Marks = {}


class WeightsAbort(Message):
    """The push of ``version`` failed for ``reason``: the replica is fenced until one succeeds, unless nothing had been loaded.

    ``push``: its number, as in `WeightsReceive`; 0: any push of the version.
    """

    version: int
    push: int = 0
    reason: Reason


class WeightsLive(Message):
    """Event and KV value ``weights/live``: ``version`` is served by ``replicas``; ``seconds``, ``bytes`` of its push, ``digest`` of it."""

    version: Count
    replicas: list[Name]
    seconds: FiniteFloat
    bytes: int
    digest: str = ""
    at: Timestamp


class ReplicaPush(Part):
    """One replica's part in a push.

    ``paused``: seconds in which it generated nothing, from the request until its engine continued. Of these, ``pausing``: until its engine
    was paused, while the transfer began; ``loading``: from its first wait for a bucket to the last one's loading; ``activating``: from the
    commit until its engine continued. None where it did not come that far. ``failure``: why it does not serve the version; empty: it does.
    """

    replica: Name
    paused: float | None = None
    pausing: float | None = None
    loading: float | None = None
    activating: float | None = None
    failure: Reason = ""


class WeightsPushed(Message):
    """Event ``<run>.weights.pushed``: a push of ``version`` has ended, well or not.

    ``joining``: seconds to make the channels (0: they stood); ``transfer``: from the first bucket's export until the last replica had said
    that it has loaded everything; ``check``: comparing what they hold with what was sent; ``activation``: the commit; ``seconds``: all of
    it; ``stall``: of it, what the trainer waited for. Steps that were not reached have 0. ``bytes``: sent by all ranks. ``failure``: why no
    replica serves it; empty: one does.
    """

    version: Count
    replicas: list[ReplicaPush]
    joining: float = 0.0
    transfer: float = 0.0
    check: float = 0.0
    activation: float = 0.0
    seconds: float = 0.0
    stall: float = 0.0
    bytes: int = 0
    failure: Reason = ""
    at: Timestamp


class WeightsSnapshot(Message):
    """KV value ``weights/snapshot``: the newest version on disk (`shared.transfer.weight_checkpoint`).

    ``form``: a whole checkpoint, or what changed. ``path``: of its directory, where the trainer sees it; the others of its chain lie
    beside it. ``bytes``: written for it. ``seconds``: that writing took. ``index``: in an object store, the object that says what the
    version is made of (`shared.transfer.object_weights`), and its bytes.
    """

    version: int
    digest: str
    form: Literal["full", "delta"]
    path: str
    bytes: int
    seconds: float
    at: float
    index: str = ""
    index_bytes: int = 0


class ObjectUrlsRequest(Message):
    """A replica asks the trainer for pre-signed URLs of objects that ``index`` names, the index itself among them. Subject
    ``<run>.objects.urls``."""

    replica: str
    index: str
    objects: list[str] = Field(min_length=1, max_length=256)


class ObjectUrls(Message):
    """The answer to an `ObjectUrlsRequest`: a URL for each object, in their order; each holds for ``seconds``, to whoever has it."""

    urls: list[str]
    seconds: float


class PeerTransferRequest(Message):
    """A replica, the destination, asks another, which serves ``version``, for its engine's weights.

    ``ranks``: of the asking engine, and of the asked; each takes from all. ``deadline``: seconds for all of it. Subject
    ``<run>.rollout.<replica>.weights.transfer``.
    """

    destination: str
    version: int
    ranks: int = Field(ge=1)
    deadline: float = Field(gt=0)


class PeerTransferOffer(Message):
    """The source's answer to a `PeerTransferRequest`: where its engine's ranks wait for the asking engine's, and what they would send.

    ``digest``: as the source says. The destination goes by the trainer's, in `WeightsLive`.
    """

    source: str
    version: int
    digest: str
    channels: list[WeightChannelAddress] = Field(min_length=1)


class WeightsSleep(Message):
    """Trainer takes the GPUs that it shares with the replica, which stops generating, keeps what it has and gives memory back.

    ``lasts``: seconds after which a replica that was not asked again takes the trainer for gone, and wakes. ``deadline``: for the engine to
    be idle and out of the way. Subject ``<run>.rollout.<replica>.weights.sleep``.
    """

    lasts: float = Field(gt=0)
    deadline: float = Field(gt=0)


class WeightsAsleep(Message):
    """Replica's answer: its engine computes nothing; it holds ``version`` (-1: what it held went with its memory)."""

    replica: str
    version: int


class WeightsWake(Message):
    """Trainer gives the GPUs back: the replica takes its memory again and serves what it holds; without weights it stays fenced.

    Subject ``<run>.rollout.<replica>.weights.wake``.
    """

    deadline: float = Field(gt=0)
