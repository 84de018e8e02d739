"""Pushes of weights to rollout replicas, beside the training: offer, prepare, receive, commit; a failed replica is left out.

Rank 0 decides (`push_schedule`) and asks the replicas (`PushRequest`); every rank takes part in the export. Requests travel on the
control client's thread, collectives run on a thread of the push, so that a dead peer ends in a named error within the deadline.
Parameters are read in place: the next step's forward and backward passes run meanwhile, and its optimizer waits for `WeightReadLock`.

A request that gets no answer, since a connection broke, is sent again: a replica answers it as it answered the first
(`services.rollout.weight_receiver`).
"""

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import structlog
import torch

from services.trainer.commands import Push
from services.trainer.control_client import ControlClient, push_spans
from services.trainer.parallel import runtime
from services.trainer.parallel.trained_model import TrainedModel
from services.trainer.weights.push_schedule import (
    ABORT_SECONDS,
    CHECK,
    COMMIT,
    OFFER_SECONDS,
    RECEIVE,
    PushRecord,
    PushResult,
    PushSchedule,
    PushWait,
    Target,
    culprits_of,
    lost_members,
    mismatches,
    replicas_without_rank,
)
from services.trainer.weights.stage_sender import ChannelKind, StageSender, whole_push
from shared.bus.bus_errors import RequestRefused
from shared.config.trainer_section import WeightsSection
from shared.model.quantization import Quantization
from shared.runtime.errors import MyxoError
from shared.runtime.tasks import describe, end_soon, log_error, run_in_thread
from shared.schema.messages import Accepted, Message
from shared.schema.service_messages import Doing
from shared.schema.weight_messages import (
    WeightChannelAddress,
    WeightsAbort,
    WeightsCommit,
    WeightsLive,
    WeightsOffer,
    WeightsPrepare,
    WeightsPushed,
    WeightsReady,
    WeightsReceive,
    WeightsReceived,
    WeightsServed,
)
from shared.transfer.digest import TensorDigest, version_digest
from shared.transfer.group_channel import on_stream
from shared.transfer.weight_channel import ChannelBroken, abort_channel

POLL_INTERVAL_S = 0.2  # the interval at which the registry's statuses are compared with the members of a push
# the time for which answers of members of one channel are awaited once one has failed: they show which member broke the shared channel
GRACE_SECONDS = 1.0
# the time for which no one may listen for a replica that listened before, or whose connection the bus's restart broke
ABSENCE_SECONDS = 3.0
OF_CHANNEL = ("ReceiverError", "")  # the errors of a replica that another member of its channel may have caused; all others are its own
Answer = TypeVar("Answer", bound=Message)


class PeerFailure(MyxoError):
    """Some replicas failed a step of the push. ``failures``: instance → reason."""

    def __init__(self, step: str, failures: dict[str, str]) -> None:
        self.failures = failures
        super().__init__(f"{step}: " + "; ".join(f"{name}: {reason}" for name, reason in sorted(failures.items())))


class PushRequest(Generic[Answer]):
    """One request under way to several replicas.

    Args:
        verb: the last part of the replicas' subject. message: makes a member's request. seconds: the deadline.

    Attributes:
        members: the instances that are asked.
        answers: instance → its answer. errors: instance → its error, or why it counts as gone. Both grow until `done`.
        gone: the errors that come from the registry, not from the replica. own: those that have no other cause than the replica.
    """

    def __init__(
        self,
        link: ControlClient,
        members: Sequence[Target],
        verb: str,
        message: Callable[[Target], Message],
        reply: type[Answer],
        seconds: float,
    ) -> None:
        self.members = tuple(target.instance for target in members)
        self._link, self._verb, self._reply, self._seconds = link, verb, reply, seconds
        self.answers: dict[str, Answer] = {}
        self.errors: dict[str, str] = {}
        self.gone: dict[str, str] = {}
        self.own: dict[str, str] = {}
        self.done: Future[None] = link.begin(self._ask_all({target: message(target) for target in members}))

    def wait(self) -> dict[str, Answer]:
        """Returns the answers once all are there. Raises PeerFailure once one has failed, and the others have had a moment to answer."""
        self.done.result(self._seconds + 30)
        if self.errors:
            raise PeerFailure(self._verb, self.errors)
        return self.answers

    @property
    def missing(self) -> list[str]:
        """Returns the members whose answers are not there yet."""
        return [name for name in self.members if name not in self.answers and name not in self.errors]

    def settle(self) -> None:
        """Waits a moment for the errors of replicas whose shared channel broke, since their request will fail."""
        with contextlib.suppress(TimeoutError):
            self.done.result(GRACE_SECONDS)
        self.done.cancel()

    async def _ask_all(self, messages: dict[Target, Message]) -> None:
        tasks = {asyncio.create_task(self._ask(target, message)): target for target, message in messages.items()}
        end: float | None = None
        try:
            while (waiting := [task for task in tasks if not task.done()]) and (end is None or time.monotonic() < end):
                await asyncio.wait(waiting, timeout=POLL_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
                self.gone |= lost_members([target for task, target in tasks.items() if not task.done()], self._link.replicas)
                self.errors |= self.gone
                if self.errors and end is None and self._verb not in ("offer", COMMIT):  # in these none waits for another
                    end = time.monotonic() + GRACE_SECONDS
        finally:
            for task in tasks:
                task.cancel()

    async def _ask(self, target: Target, message: Message) -> None:
        service, started = self._link.service, time.monotonic()
        subject = service.subjects.replica_weights(target.instance, self._verb)
        try:
            self.answers[target.instance] = await service.bus.request(
                subject, message, self._reply, deadline=self._seconds, awaited_from=target.instance, absence=ABSENCE_SECONDS
            )
        except Exception as error:
            if not isinstance(error, MyxoError):  # of our own code or a library: the push ends with it, too
                log_error("push_request_failed", f"{self._verb} of {target.instance}", error)
            reason = self.errors[target.instance] = f"{describe(error)} ({time.monotonic() - started:.1f} s)"
            if isinstance(error, RequestRefused) and error.error not in OF_CHANNEL:
                self.own[target.instance] = reason


THREAD_MARGIN = 30.0  # seconds beyond a push's deadline that a change of the parameters waits for its end


class Pusher:
    """One rank's side of pushes. All ranks construct it together.

    Args:
        link: rank 0's client; None on the others. kind: that of the channels. quantization: of the engines' checkpoint. takes: whether
            its pushes go to the replica of that name.

    Attributes:
        schedule: rank 0's decisions.
    """

    def __init__(
        self,
        link: ControlClient | None,
        model: TrainedModel,
        config: WeightsSection,
        kind: ChannelKind = "group",
        quantization: Quantization | None = None,
        takes: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._link, self._model, self._config, self._takes = link, model, config, takes
        bucket_bytes, dtype = config.update_weight_buffer_size, config.update_weight_dtype
        self._sender = StageSender(model, kind, config.push_timeout, bucket_bytes, dtype, quantization)
        self.schedule = PushSchedule()
        self._channels: list[WeightChannelAddress] = []
        self._known: dict[str, TensorDigest] = {}
        self._manifests: dict[bool, dict[str, str]] = {}  # by whether the push is partial: channel → its manifest's id
        self._record = PushRecord(0, (), {}, 0.0)  # of the push under way, and its request
        self._request: PushRequest[WeightsReceived] | None = None
        self._asked: PushRequest[Any] | None = None  # the newest request of the push
        self._pushing: Future[None] | None = None
        self._closing = False
        self._live = -1  # the newest version that is known to have been announced
        self._declined: dict[str, str] = {}  # who declined the last offer → why
        self._results: list[PushResult] = []
        self._log: Any = structlog.get_logger()

    # --- on the training's thread

    def due(self, version: int) -> Push | None:
        """Returns, on rank 0, the push to begin now: some replicas are behind, they accept, and no other push is under way.

        A version that is served but was never announced is pushed again: an earlier life of the trainer ended between the two, and nothing
        is admitted before its announcement.
        """
        if self.busy or self._link is None:
            return None
        if not (targets := self._targets(self._link, version)):
            return None
        offered = self._ask(targets, "offer", lambda _: WeightsOffer(version=version), WeightsReady, OFFER_SECONDS)
        self._declined = {}
        try:
            offered.wait()  # only replicas that answer join a channel: its members would wait for a dead one
        except PeerFailure as error:
            self._declined = dict(error.failures)
        machines = {name: [answer.address, *answer.further] for name, answer in offered.answers.items()} if self._sender.machines else {}
        self._declined |= replicas_without_rank(machines, self._sender.machines)
        if self._declined:
            self._log.warning("offer_declined", version=version, replicas=self._declined)
            self.schedule.blame([target for target in targets if target.instance in self._declined], time.monotonic())
        digests = {name: answer.digest for name, answer in offered.answers.items() if name not in self._declined}
        unchanged = self._config.skip_unchanged
        if (push := self.schedule.next_push(version, targets, digests, skip_unchanged=unchanged, machines=machines)) is None:
            self._record, self._request = PushRecord(version, (), self._declined, time.monotonic()), None
            self._report(time.monotonic(), "every replica declined the offer")
        return push

    def lags(self, version: int) -> bool:
        """Returns, on rank 0, whether some replica is behind and may be offered the version now."""
        return self._link is not None and bool(self._targets(self._link, version))

    def _targets(self, link: ControlClient, version: int) -> tuple[Target, ...]:
        """Returns the replicas that are behind, or where there are none and the version was never announced, those that serve it."""
        replicas = [status for status in link.replicas if self._takes(status.instance)]
        if (behind := self.schedule.behind(replicas, version, time.monotonic())) or self._live >= version:
            return behind
        self._live = link.live_version()
        return () if self._live >= version else self.schedule.serving(replicas, version)

    def forget(self, instances: Iterable[str]) -> None:
        """Forgets the versions that these replicas had confirmed, since they have lost them."""
        self.schedule.forget(instances)

    @property
    def busy(self) -> bool:
        """Returns whether a push is under way. Raises the error that ended one on this rank, unless it came from the replicas."""
        if self._pushing is not None and self._pushing.done():
            self._pushing.result()
            self._pushing = None
        return self._pushing is not None

    @property
    def awaited(self) -> PushWait | None:
        """Returns, on rank 0, what the push that is under way waits for; None without one. Any thread may ask."""
        if self._link is None or self._pushing is None or self._pushing.done():
            return None
        return self._record.wait(self._asked.missing if self._asked is not None else (), time.monotonic())

    def begin(self, push: Push) -> None:
        """Starts a push that rank 0 has decided on. All ranks call it."""
        self.wait()
        self._model.readers.begin(f"the push of version {push.version}", self._config.push_timeout + THREAD_MARGIN)
        device = runtime.device()
        written = torch.cuda.current_stream().record_event() if device.type == "cuda" else None

        def work() -> None:
            stream = None
            try:
                if written is not None:
                    torch.cuda.set_device(device)
                    stream = torch.cuda.Stream()
                    stream.wait_event(written)
                with on_stream(stream):
                    self._run(push)
            except BaseException as error:
                if not self._closing:  # the training's thread may find out only after a long step
                    log_error("died", threading.current_thread().name, error)
                    end_soon(error)
                raise
            finally:
                self._model.readers.over()

        self._pushing = run_in_thread(work, f"push-{push.version}")

    def doing(self) -> Doing | None:
        """Returns what a push under way waits for, on rank 0; any thread may ask. None while there is none."""
        return None if (wait := self.awaited) is None else wait.doing(self._config.push_timeout, time.time())

    def wait(self) -> None:
        """Returns once no push is under way."""
        if self._pushing is not None:
            concurrent.futures.wait([self._pushing], self._config.push_timeout + runtime.timeout_seconds())
        if self.busy:
            raise MyxoError("the push of weights did not end in time")

    def results(self) -> list[PushResult]:
        """Returns, on rank 0, the results of pushes that have ended since the last call. Raises as `busy` does."""
        if self.busy and not self._results:
            return []
        ended, self._results = self._results, []
        return ended

    def close(self) -> None:
        """Ends a push that is under way, and closes channels and groups."""
        self._closing = True
        self._sender.abort("the trainer is about to stop")
        if self._pushing is not None:
            concurrent.futures.wait([self._pushing], ABORT_SECONDS)
        self._sender.close()

    # --- on the push's thread

    def _run(self, push: Push) -> None:
        """Runs the push on all ranks. An error of replicas or channels ends the push and is reported; one among the ranks is raised."""
        started, end = time.monotonic(), time.monotonic() + self._config.push_timeout
        members = [target.instance for target in self.schedule.members]
        self._record, self._request = PushRecord(push.version, members, self._declined, started), None
        try:
            if push.engine_ranks:
                self._join(push, end)
            streaming = time.monotonic()
            sent, digest = self._transfer(push, end)
            wire_seconds = time.monotonic() - streaming
            if self._config.check_weight_update_equal:
                self._transfer(push, end, check=True)
            committed = self._commit(push, digest, end)
        except (PeerFailure, ChannelBroken) as error:
            ended = time.monotonic()
            self._give_up(push, error)
            self._trace(self._report(ended, str(error)))
            return
        self._trace(self._report(time.monotonic(), "" if committed else "no replica confirmed that it serves it", sent))
        if self._link is not None and committed:
            seconds = time.monotonic() - started
            live = WeightsLive(version=push.version, replicas=committed, seconds=seconds, bytes=sent, digest=digest, at=time.time())
            self._link.weights_live(live)
            engine_seconds = max((answer.seconds for answer in self._request.answers.values()), default=0.0) if self._request else 0.0
            times = seconds, wire_seconds, engine_seconds, self._model.readers.stall
            self._results.append(PushResult(push.version, committed, *times, sent, digest, self._record.marks(self._sender.marks)))

    def _join(self, push: Push, end: float) -> None:
        self._channels = self._sender.open(push.number, push.engine_ranks)
        self._together(lambda: self._prepare(push.version, _left(end)))
        with self._watched_members():
            self._together(lambda: self._sender.join(_left(end)))

    def _prepare(self, version: int, seconds: float) -> None:

        def message(target: Target) -> WeightsPrepare:
            channels, first = self._channels_of(target), self.schedule.first_ranks(target)
            machines = first if len(first) > 1 else {}
            return WeightsPrepare(version=version, channels=channels, rank=next(iter(first.values())), machines=machines, deadline=seconds)

        if self._link is not None:
            self._ask(self.schedule.members, "prepare", message, WeightsReady, seconds).wait()

    def _channels_of(self, target: Target) -> list[WeightChannelAddress]:
        return [channel for channel in self._channels if not target.machines or channel.address in target.machines]

    @contextlib.contextmanager
    def _watched_members(self) -> Iterator[None]:
        """Ends the joining of the body, on rank 0, when a member is lost. Raises PeerFailure then."""
        if (link := self._link) is None:
            yield
            return

        async def watched() -> dict[str, str]:
            while not (lost := lost_members(self.schedule.members, link.replicas)):
                await asyncio.sleep(POLL_INTERVAL_S)
            return lost

        watch = link.begin(watched())
        watch.add_done_callback(lambda lost: None if lost.cancelled() else self._end_channels(lost.result()))
        try:
            yield
        except ChannelBroken:
            if watch.done():
                raise PeerFailure("join", watch.result()) from None
            raise
        finally:
            watch.cancel()

    def _transfer(self, push: Push, end: float, *, check: bool = False) -> tuple[int, str]:
        """Sends all buckets, which the replicas load, or compare with what they hold. Returns bytes of all stages, and the digest.

        Raises ChannelBroken, on all ranks if one channel broke; PeerFailure on rank 0.
        """
        number = push.number + check
        self._record.begin(CHECK if check else RECEIVE, time.monotonic())
        seconds, ids = _left(end), self._manifests.get(push.partial, {})

        def message(target: Target) -> WeightsReceive:
            names = [channel.name for channel in self._channels_of(target)]
            return WeightsReceive(version=push.version, push=number, channels=names, manifests=ids, check=check, deadline=seconds)

        def ask() -> None:
            if self._link is not None:
                self._request = request = self._ask(self.schedule.members, "receive", message, WeightsReceived, seconds)
                request.done.add_done_callback(lambda _: self._end_channels(request.errors) if request.errors else None)

        exported = self._model.readers.over if check or not self._config.check_weight_update_equal else lambda: None
        sent = self._sender.send(number, partial=push.partial, seconds=seconds, ask=ask, exported=exported)
        whole = whole_push(self._sender.agree(sent))
        self._manifests[push.partial] = whole.manifests
        self._known = {**self._known, **whole.known} if push.partial else whole.known
        digest = version_digest(self._known)
        self._together(lambda: self._verify(number, digest))
        return whole.bytes, digest

    def _verify(self, number: int, digest: str) -> None:
        """Returns, on rank 0, once every replica has found equal weights. Raises PeerFailure.

        What the engines say over the channel comes first. At the commit each replica compares once more, with its engine's answer.
        """
        request, compares = self._request, self._config.check_weight_update_equal
        known = request is None or (not compares and self._sender.held_by_all(number, digest, request.done.done))
        answers = {} if known or request is None else request.wait()
        self._record.begin(CHECK, time.monotonic())
        if failures := mismatches(answers, digest):
            raise PeerFailure(self._record.step, failures)

    def _commit(self, push: Push, digest: str, end: float) -> list[str]:
        self._record.begin(COMMIT, time.monotonic())
        if self._link is None:
            return []
        members, message = self.schedule.members, WeightsCommit(version=push.version, digest=digest, deadline=_left(end))
        request = self._ask(members, "commit", lambda _: message, WeightsServed, message.deadline)
        try:
            request.wait()
        except PeerFailure as error:
            self._report_failure(push, error, [target for target in members if target.instance not in request.answers], error.failures)
        committed = [target for target in members if target.instance in request.answers]
        self.schedule.confirmed(committed, push.version, digest)
        (self._request or request).settle()  # its answers are there, unless a replica has failed in between
        self._record.served = request.answers
        return [target.instance for target in committed]

    def _together(self, work: Callable[[], object]) -> None:
        """Runs a step that ends the push on all ranks if it fails on one. Raises the error of ``work``, elsewhere ChannelBroken."""
        failure: PeerFailure | ChannelBroken | None = None
        try:
            work()
        except (PeerFailure, ChannelBroken) as error:
            failure = error
        reported = [text for text in self._sender.agree(str(failure) if failure else None) if text is not None]
        if failure is not None:
            raise failure
        if reported:
            raise ChannelBroken(reported[0])

    def _give_up(self, push: Push, error: PeerFailure | ChannelBroken) -> None:
        self._sender.abort(str(error))
        self._sender.drop()
        if self._link is None:
            return
        members, request = self.schedule.members, self._request
        if request is not None and isinstance(error, ChannelBroken):
            request.settle()
        if isinstance(error, PeerFailure) and (request is None or not request.errors):
            culprits = error.failures
        elif request is None:
            culprits = culprits_of(members, (), {}, {})
        else:
            culprits = culprits_of(members, request.answers, request.errors, request.gone, request.own)
        self._report_failure(push, error, members, culprits)

    def _report_failure(self, push: Push, error: Exception, members: Sequence[Target], culprits: dict[str, str]) -> None:
        self._log.warning("push_failed", version=push.version, step=self._record.step, error=str(error), replicas=culprits)
        self._record.failed(culprits)
        self.schedule.failed(members, culprits, time.monotonic())
        try:
            message = WeightsAbort(version=push.version, push=push.number, reason=f"{self._record.step}: {error}")
            blamed = [target for target in members if target.instance in culprits]
            self._ask(blamed, "abort", lambda _: message, Accepted, ABORT_SECONDS)  # nothing waits for these
            others = [target for target in members if target not in blamed]
            self._ask(others, "abort", lambda _: message, Accepted, ABORT_SECONDS).wait()
        except PeerFailure as silent:
            self._log.info("abort_unanswered", version=push.version, error=str(silent))

    def _report(self, ended: float, failure: str, sent: int = 0) -> WeightsPushed | None:
        """Publishes, on rank 0, what the push came to, and returns it. ``ended``: monotonic; ``failure``: why none serves its version;
        ``sent``: bytes."""
        if self._link is None:
            return None
        if self._request is not None:
            self._record.received = self._request.answers
        event = self._record.event(ended, time.time(), stall=self._model.readers.stall, sent=sent, failure=failure)
        self._link.report("pushed", event, plane="weights")
        return event

    def _trace(self, event: WeightsPushed | None) -> None:
        if event is not None and self._link is not None and self._link.traces.on and self._channels:
            for span in push_spans(event, self._channels[0].name):
                self._link.traces.add(span)

    def _ask(
        self, members: Sequence[Target], verb: str, message: Callable[[Target], Message], reply: type[Answer], seconds: float
    ) -> PushRequest[Answer]:
        assert self._link is not None  # rank 0
        self._asked = request = PushRequest(self._link, members, verb, message, reply, seconds)
        return request

    def _end_channels(self, errors: dict[str, str]) -> None:
        """Ends the waits of all ranks' channels; those of other ranks read it from their stores."""
        reason = "; ".join(f"{name}: {error}" for name, error in errors.items())
        self._sender.abort(reason)
        for channel in self._channels[1:]:
            abort_channel(channel, reason)


def _left(end: float) -> float:
    return max(0.1, end - time.monotonic())
