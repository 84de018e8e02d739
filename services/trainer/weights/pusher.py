"""Pushing weights to rollout replicas, beside the training: offer, prepare, receive, commit; whoever fails is left out, the others go on.

Rank 0 decides and talks to the replicas; every rank takes part in the export. The requests travel over the bus on the link's thread, the
collectives run on a thread of the push, so that a dead peer ends in a named error within the deadline. Parameters are read in place: the
next step's forward and backward passes run meanwhile, and its optimizer waits until they have been read (`megatron.readers`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import structlog
import torch
from torch.distributed import TCPStore

from services.trainer.commands import Push
from services.trainer.control_client import ControlClient, now
from services.trainer.megatron import runtime
from services.trainer.megatron.gpt_model import MegatronModel
from services.trainer.megatron.weight_read_lock import WeightRead
from services.trainer.weights.push_requests import Asked, PeerFailure, PushRequests
from services.trainer.weights.push_result import PushResult
from services.trainer.weights.replicas import Replicas, Target, guilty
from services.trainer.weights.sender import LaneKind, Sender
from services.trainer.weights.weight_channel import WeightChannelBroken
from shared.config.weights_section import WeightsSection
from shared.runtime.errors import MyxoError
from shared.runtime.failures import end_soon, log_error
from shared.schema.messages import (
    Accepted,
    Message,
    WeightChannelAddress,
    WeightsAbort,
    WeightsCommit,
    WeightsLive,
    WeightsOffer,
    WeightsPrepare,
    WeightsReady,
    WeightsReceive,
    WeightsReceived,
)
from shared.transfer.digest import TensorDigest, version_digest

OFFER_SECONDS = 5.0
"""How long a replica has to say that it can take a version."""

ABORT_SECONDS = 10.0
THREAD_MARGIN = 30.0


class Pusher:
    """One rank's side of pushes. All ranks construct it together.

    Args:
        link: rank 0's; None on the others. kind: of the channels.
    """

    def __init__(self, link: ControlClient | None, model: MegatronModel, config: WeightsSection, kind: LaneKind = "group") -> None:
        self._link, self._model, self._config = link, model, config
        self._sender = Sender(model, kind, config.push_timeout, config.update_weight_buffer_size, config.update_weight_dtype)
        self._calls = PushRequests(link) if link is not None else None
        self._replicas = Replicas()
        self._members: tuple[Target, ...] = ()
        self._channels: list[WeightChannelAddress] = []
        self._digests: set[str] = set()  # of versions that were pushed in this life
        self._known: dict[str, TensorDigest] = {}
        self._number = 0
        self._thread: threading.Thread | None = None
        self._reading: WeightRead | None = None
        self._failure: BaseException | None = None
        self._closing = False
        self._results: list[PushResult] = []
        self._log: Any = structlog.get_logger()

    # --- on the training's thread

    def due(self, version: int) -> Push | None:
        """Rank 0: the push to begin now: some replicas are behind, they are willing, and no other push is under way."""
        if self.busy or self._link is None:
            return None
        targets = self._replicas.behind(self._link.replicas, version, time.monotonic())
        ready = self._willing(version, targets) if targets else {}
        if not ready:
            return None
        members = tuple(target for target in targets if target.instance in ready)
        renew = members != self._members
        self._members = members
        self._number += 2  # a check of the push has the odd number behind it
        frozen_there = all(answer.digest in self._digests for answer in ready.values())
        return Push(
            version,
            self._number,
            engine_ranks=sum(target.ranks for target in members) if renew else 0,
            partial=self._config.skip_unchanged and frozen_there,
        )

    def lags(self, version: int) -> bool:
        """Rank 0: whether some replica is behind and may be offered the version now."""
        return self._link is not None and bool(self._replicas.behind(self._link.replicas, version, time.monotonic()))

    def forget(self, instances: Iterable[str]) -> None:
        """These replicas have lost what they had confirmed."""
        self._replicas.forget(instances)

    @property
    def busy(self) -> bool:
        """Whether a push is under way. Raises what ended one on this rank, if that was no matter of the replicas."""
        if self._thread is not None and not self._thread.is_alive():
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            raise self._failure
        return self._thread is not None

    def begin(self, push: Push) -> None:
        """All ranks: starts a push that rank 0 has ordered."""
        self.wait()
        self._reading = self._model.readers.begin(f"the push of version {push.version}", self._config.push_timeout + THREAD_MARGIN)
        place = runtime.device()
        written = torch.cuda.current_stream().record_event() if place.type == "cuda" else None

        def work() -> None:
            try:
                if written is not None:
                    torch.cuda.set_device(place)
                    stream = torch.cuda.Stream()
                    stream.wait_event(written)
                    with torch.cuda.stream(stream):
                        self._run(push)
                else:
                    self._run(push)
            except BaseException as error:
                self._failure = error
                if not self._closing:  # the training's thread may find out only after a long step
                    log_error("died", threading.current_thread().name, error)
                    end_soon(error)
            finally:
                self._read()

        self._thread = threading.Thread(target=work, name=f"push-{push.version}", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once no push is under way."""
        thread = self._thread
        if thread is not None:
            thread.join(self._config.push_timeout + runtime.timeout_seconds())
        if self.busy:
            raise MyxoError("the push of weights did not end in time")

    def results(self) -> list[PushResult]:
        """Those of pushes that have ended since the last call, on rank 0. Raises what ended one on this rank, as `busy` does."""
        ended: list[PushResult] = []
        if self.busy and not self._results:
            return ended
        while self._results:
            ended.append(self._results.pop(0))
        return ended

    def close(self) -> None:
        """Ends a push that is under way, and lets go of channels and groups."""
        self._closing = True
        self._sender.abort("the trainer is about to stop")
        if self._thread is not None:
            self._thread.join(ABORT_SECONDS)
        self._sender.close()

    def _willing(self, version: int, targets: tuple[Target, ...]) -> dict[str, WeightsReady]:
        """Those that say they can take the version now. A channel is made with nobody else: its other members would wait for the dead."""
        asked = self._asked(targets, "offer", lambda _: WeightsOffer(version=version), WeightsReady, OFFER_SECONDS)
        try:
            asked.wait()
        except PeerFailure as error:
            self._log.warning("offer_declined", version=version, replicas=error.failures)
            self._replicas.blame([target for target in targets if target.instance in error.failures], time.monotonic())
        return {name: answer for name, answer in asked.answers.items() if isinstance(answer, WeightsReady)}

    # --- on the push's thread

    def _run(self, push: Push) -> None:
        """All ranks. What goes wrong with replicas or channels ends the push and is told; what goes wrong among the ranks is raised."""
        started, end = time.monotonic(), time.monotonic() + self._config.push_timeout
        step, asked = "prepare", None
        try:
            if push.engine_ranks:
                self._join(push, end)
            step, streaming = "receive", time.monotonic()
            asked = self._receiving(push, push.number, end)
            sent, known = self._streamed(push, push.number, end, last=not self._config.check_weight_update_equal)
            digest = self._received(asked, known, push.partial)
            wire_seconds = time.monotonic() - streaming
            engine_seconds = max((answer.seconds for answer in _received(asked).values()), default=0.0)
            if self._config.check_weight_update_equal:
                step = "check"
                asked = self._receiving(push, push.number + 1, end, check=True)
                self._streamed(push, push.number + 1, end, last=True)
                self._compared(asked)
            step = "commit"
            committed = self._committed(push, digest, end)
        except (PeerFailure, WeightChannelBroken) as error:
            self._give_up(push, step, error, asked)
            return
        if self._link is not None and committed:
            stall = self._reading.stall if self._reading is not None else 0.0
            seconds = time.monotonic() - started
            self._report(PushResult(push.version, committed, seconds, wire_seconds, engine_seconds, stall, sent, digest))

    def _join(self, push: Push, end: float) -> None:
        """Everyone is in new channels."""
        self._channels = self._sender.open(push.number, push.engine_ranks)
        seconds = _left(end)

        def place(target: Target) -> WeightsPrepare:
            before = self._members[: self._members.index(target)]
            rank = 1 + sum(other.ranks for other in before)
            return WeightsPrepare(version=push.version, channels=self._channels, rank=rank, deadline=seconds)

        self._together(lambda: self._asked(self._members, "prepare", place, WeightsReady, seconds).wait() if self._calls else None)
        watch = self._calls.watch(self._members) if self._calls is not None else None
        if watch is not None:
            watch.add_done_callback(lambda gone: None if gone.cancelled() else self._end_lanes(push.number, gone.result()))
        try:
            self._together(lambda: self._sender.join(_left(end)))
        except WeightChannelBroken:
            if watch is not None and watch.done():
                raise PeerFailure("join", watch.result()) from None
            raise
        finally:
            if watch is not None:
                watch.cancel()

    def _receiving(self, push: Push, number: int, end: float, check: bool = False) -> Asked | None:
        """Rank 0: has the replicas take what is about to be sent. A replica that fails ends what the channels wait for."""
        if self._calls is None:
            return None
        order = WeightsReceive(
            version=push.version, push=number, channels=[channel.name for channel in self._channels], check=check, deadline=_left(end)
        )
        asked = self._asked(self._members, "receive", lambda _: order, WeightsReceived, _left(end))
        asked.done.add_done_callback(lambda _: self._end_lanes(number, asked.errors) if asked.errors else None)
        return asked

    def _streamed(self, push: Push, number: int, end: float, *, last: bool) -> tuple[int, dict[str, TensorDigest]]:
        """Bytes that all stages have sent, and their tensors. Raises LaneBroken, on all ranks if one channel broke.

        Args:
            last: nothing of the model is read after it.
        """
        sent = self._sender.stream(number, partial=push.partial, seconds=_left(end))
        if last:
            self._read()
        sent = self._sender.finish(sent)
        told = self._sender.agree([sent.bytes, {name: asdict(one) for name, one in sent.known.items()}, sent.error])
        if broken := [error for _, _, error in told if error is not None]:
            raise WeightChannelBroken(broken[0])
        known = {
            name: TensorDigest(one["dtype"], tuple(one["shape"]), one["digest"]) for _, tensors, _ in told for name, one in tensors.items()
        }
        return sum(count for count, _, _ in told), known

    def _received(self, asked: Asked | None, known: dict[str, TensorDigest], partial: bool) -> str:
        """The version's digest, once every replica has found the same."""
        self._known = {**self._known, **known} if partial else known
        digest = version_digest(self._known)

        def compare() -> None:
            if asked is None:
                return
            differing = {
                name: f"the weights that it got have digest {answer.digest}, not {digest}"
                for name, answer in _received(asked.wait()).items()
                if answer.digest != digest
            }
            if differing:
                raise PeerFailure("receive", differing)

        self._together(compare)
        return digest

    def _compared(self, asked: Asked | None) -> None:
        """What the engines hold is what was sent."""

        def look() -> None:
            if asked is None:
                return
            differing = {
                name: f"{len(answer.differences)} tensors differ from the trainer's, first {next(iter(answer.differences.items()))}"
                for name, answer in _received(asked.wait()).items()
                if answer.differences
            }
            if differing:
                raise PeerFailure("check", differing)

        self._together(look)

    def _committed(self, push: Push, digest: str, end: float) -> list[str]:
        """Rank 0: whoever commits serves; whoever does not is fenced, and the push stands for the others."""
        if self._calls is None:
            return []
        order = WeightsCommit(version=push.version, digest=digest, deadline=_left(end))
        asked = self._asked(self._members, "commit", lambda _: order, Accepted, _left(end))
        try:
            asked.wait()
        except PeerFailure as error:
            failed = [target for target in self._members if target.instance not in asked.answers]
            self._tell_failure(push, "commit", error, failed, error.failures)
            self._members = ()  # the channels have a member too many: new ones next time
        committed = [target for target in asked.members if target.instance in asked.answers]
        self._replicas.confirmed(committed, push.version)
        self._digests.add(digest)
        return [target.instance for target in committed]

    def _together(self, work: Callable[[], object]) -> None:
        """A step that ends the push on all ranks if it fails on one. Raises what ``work`` raised, elsewhere LaneBroken."""
        failure: PeerFailure | WeightChannelBroken | None = None
        try:
            work()
        except (PeerFailure, WeightChannelBroken) as error:
            failure = error
        told = [one for one in self._sender.agree(str(failure) if failure else None) if one is not None]
        if failure is not None:
            raise failure
        if told:
            raise WeightChannelBroken(told[0])

    def _give_up(self, push: Push, step: str, error: PeerFailure | WeightChannelBroken, asked: Asked | None) -> None:
        """Aborts the push at all its replicas and drops the channels; the guilty are offered the next push later."""
        self._sender.abort(str(error))
        self._sender.drop()
        if self._link is None:
            return
        members, self._members = self._members, ()
        if asked is not None and isinstance(error, WeightChannelBroken):
            asked.settle()
        errors = dict(asked.errors) if asked is not None else {}
        if isinstance(error, PeerFailure) and not errors:
            failures = error.failures
        else:
            answered = {name: None for name in (target.instance for target in members)} | errors
            answered |= {name: "" for name in (asked.answers if asked is not None else {})}
            failures = guilty(members, answered, asked.gone if asked is not None else {})
        self._tell_failure(push, step, error, members, failures)

    def _tell_failure(self, push: Push, step: str, error: Exception, members: Sequence[Target], failures: dict[str, str]) -> None:
        self._log.warning("push_failed", version=push.version, step=step, error=str(error), replicas=failures)
        self._replicas.blame([target for target in members if target.instance in failures], time.monotonic())
        self._replicas.forget(target.instance for target in members)
        abort = WeightsAbort(version=push.version, reason=f"{step}: {error}")
        try:
            self._asked(members, "abort", lambda _: abort, Accepted, ABORT_SECONDS).wait()
        except PeerFailure as silent:
            self._log.info("abort_unanswered", version=push.version, error=str(silent))

    def _report(self, result: PushResult) -> None:
        assert self._link is not None  # rank 0
        live = WeightsLive(
            version=result.version, replicas=result.replicas, seconds=result.seconds, bytes=result.bytes, digest=result.digest, at=now()
        )
        self._link.weights_live(live)
        self._results.append(result)

    def _asked(
        self, members: Sequence[Target], verb: str, message: Callable[[Target], Message], reply: type[Message], seconds: float
    ) -> Asked:
        assert self._calls is not None  # rank 0
        return self._calls.each(members, verb, message, reply, seconds)

    def _end_lanes(self, number: int, errors: dict[str, str]) -> None:
        """Ends what the channels of all ranks wait for; those of other ranks look into their stores."""
        reason = "; ".join(f"{name}: {error}" for name, error in errors.items())
        self._sender.abort(reason)
        for channel in self._channels[1:]:
            with contextlib.suppress(RuntimeError):
                store = TCPStore(
                    channel.address, channel.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ABORT_SECONDS)
                )
                store.set(f"aborted/{number}", reason)

    def _read(self) -> None:
        if self._reading is not None:
            self._reading.over()


def _received(asked: Asked | None) -> dict[str, WeightsReceived]:
    answers = asked.answers if asked is not None else {}
    return {name: answer for name, answer in answers.items() if isinstance(answer, WeightsReceived)}


def _left(end: float) -> float:
    return max(0.1, end - time.monotonic())
