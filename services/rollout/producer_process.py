"""The process of a rollout function: ``python -m services.rollout.producer_process``, started by `services.rollout.producer`.

In, once: ``[0, {"config": JSON, "prompts": count}]``, answered with ``[0, {}]`` or ``[0, {"refused": [field, value, expected]}]``. From
then on it asks and the service answers (`ServiceCalls`): ``next`` says when to call the function, ``draw`` gives it prompts, ``hand_in``,
``give_back``, ``fail`` and ``discard`` say what became of a group, ``finished`` ends a call. A function that raises ends the process.

The groups that the function has are known by their samples: as long as one of them, or a copy of it, is referenced, the function may still
hand the group in. Afterwards it cannot.
"""

import asyncio
import gc
import inspect
import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from shared.config.run_config import RunConfig
from shared.hooks import Arguments, load, paths
from shared.hooks.hook_sample import HookSample, Status, status_of
from shared.hooks.returned_output import ReturnedGroup, metric_numbers, returned_groups, train_output
from shared.hooks.sample_conversion import Served, from_stored, to_stored
from shared.hooks.slime.prompt_sources import DataSource
from shared.model.families import replayed_choices
from shared.process.call_server import FrameStream
from shared.runtime.errors import BadMessage, ConfigError, MyxoError
from shared.runtime.tasks import error_text, print_traceback, run_in_thread
from shared.schema import sample as sample_codec
from shared.schema.sample import Sample as StoredSample
from shared.schema.sample import SampleLimits


class CallRefused(MyxoError):
    """The service does not do what it was asked for; the text says why."""


class ServiceCalls:
    """The process's end of the pipes. It ends with the service: whoever is left to wait for an answer would wait for ever."""

    def __init__(self, channel: FrameStream) -> None:
        self._channel, self._sending, self._ids = channel, threading.Lock(), itertools.count(1)
        self._open: dict[int, Future[dict[str, Any]]] = {}
        run_in_thread(self._receive, "producer-answers")

    def call(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Returns the service's answer, which keeps its own deadline. Raises CallRefused."""
        call_id, answer = next(self._ids), Future[dict[str, Any]]()
        self._open[call_id] = answer
        with self._sending:
            self._channel.send([call_id, {"verb": verb, **fields}])
        given = answer.result()
        if "refused" in given:
            raise CallRefused(str(given["refused"]))
        return given

    def _receive(self) -> None:
        try:
            while True:
                call_id, answer = self._channel.receive()
                self._open.pop(call_id).set_result(answer)
        finally:
            os._exit(0)


POLL_INTERVAL_S = 0.2  # the interval at which a function that waits for prompts is looked at: it may have finished all that it has

# The time that a call in an event loop waits for prompts while it has others: what is being generated on that loop stands still.
GLANCE_S = 0.02

# The time after which a thread that waits for prompts gets groups ahead of those that will be discarded, though it has unfinished ones.
PATIENCE_S = 30.0


# The time after which a call that has finished all its groups, and still does not end, gets more: it needs more than there are.
FINISHED_S = 3.0

_ENDED = Status.COMPLETED, Status.TRUNCATED, Status.FAILED


class _Token:
    """Is shared by the session ids of a group's samples and of all copies of these."""

    def __copy__(self) -> "_Token":
        return self

    def __deepcopy__(self, _: object) -> "_Token":
        return self

    def __reduce__(self) -> Any:
        return _Token, ()


class _SessionId(str):
    """A sample's session id, which every copy of the sample takes along, and with it the group's token."""

    token: _Token


@dataclass
class DrawnGroup:
    """A group that the function has taken. ``begun``: the version that was served then. ``samples``: those it got, as long as they
    live."""

    group: str
    number: int
    attempt: int
    begun: int
    token: "weakref.ref[_Token]"
    samples: list["weakref.ref[HookSample]"] = field(default_factory=list)

    @property
    def held(self) -> bool:
        """Returns whether the function may still hand it in."""
        return self.token() is not None or any(sample() is not None for sample in self.samples)

    @property
    def finished(self) -> bool:
        """Returns whether all of its samples that are still there have ended."""
        living = [sample for reference in self.samples if (sample := reference()) is not None]
        return all(status_of(sample.status) in _ENDED for sample in living)


def _done(samples: Sequence[HookSample]) -> bool:
    """Takes those samples of a returned group as done of which its function says nothing, as with slime. Returns False where it has done
    nothing to any."""
    statuses = {status_of(sample.status) for sample in samples}
    for sample in samples:
        if status_of(sample.status) is Status.PENDING and (sample.response_length or Status.ABORTED not in statuses):
            sample.status = Status.COMPLETED
    return statuses != {Status.PENDING} or any(sample.response_length or sample.remove_sample for sample in samples)


class PositionlessSource(DataSource):
    """A data source whose position is the buffer's. ``prompts``: how many the run has."""

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts
        self.metadata: dict[str, Any] = {}

    def __len__(self) -> int:
        return self._prompts

    def save(self, rollout_id: int) -> None:
        """Does nothing: the ledger knows which prompts were taken."""

    def load(self, rollout_id: int | None = None) -> None:
        """Does nothing, as `save`."""

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def get_buffer_length(self) -> int:
        """Returns 0: what was given back is with the buffer, in the queue with all other prompts."""
        return 0


class DrawnGroups(PositionlessSource):
    """slime's data source over the buffer's tasks. Every method may be called from any thread. ``in_call``: the function is at work on a
    rollout, and does not just continue with groups in the background."""

    def __init__(self, calls: ServiceCalls, config: RunConfig, prompts: int) -> None:
        super().__init__(prompts)
        self._calls, self._config = calls, config
        self._choices = replayed_choices(config)
        self._n = config.rollout.n_samples_per_prompt
        self._lock = threading.Lock()
        self._drawn: dict[int, DrawnGroup] = {}
        self.in_call = False
        self._all_finished_at: float | None = None  # since when, in a call that asks for more
        self._spinning: dict[int, int] = {}  # event loop → calls without prompts since it last ran

    # --- slime's data source

    def get_samples(self, num_samples: int) -> list[list[HookSample]]:
        """Returns prompts as groups of n samples, some with the tokens that they had when they were given back.

        A plain thread waits until there are ``num_samples``. A call on an event loop returns fewer, or none, where others are unfinished:
        they are generated on that loop. One that calls again and again without giving way is waited for, too.

        Raises CallRefused where the buffer has no prompts within the deadline.
        """
        loop = _running_loop()
        found: list[list[HookSample]] = []
        started = time.monotonic()
        while len(found) < num_samples:
            missing = num_samples - len(found)
            starving = self._starving(started, loop)
            seconds = POLL_INTERVAL_S if loop is None or id(loop) in self._spinning or not self._drawn else GLANCE_S
            answer = self._calls.call("draw", n=missing, seconds=seconds, starving=starving)
            found += [self._taken(entry, answer["version"]) for entry in answer["groups"]]
            if loop is not None and (found or self._gives_way(loop)):
                break
        if loop is not None and found:
            self._spinning.pop(id(loop), None)
        return found

    def add_samples(self, samples: list[list[HookSample]]) -> None:
        """Gives groups back: they are taken again later, with the tokens that they have. Raises ValueError for one that was not
        taken."""
        for group in samples:
            flat = _flat(group)
            numbers = {sample.group_index for sample in flat}
            drawn = self._drawn.get(flat[0].group_index or 0) if len(numbers) == 1 else None
            if drawn is None:
                raise ValueError(f"add_samples: group_index {sorted(map(str, numbers))} is not one of the groups that get_samples gave")
            self.give_back(drawn, flat)

    def __getattr__(self, name: str) -> NoReturn:
        """Raises AttributeError: a source of the user's own gives prompts to the buffer, in a process of its own, and is not here."""
        there = "get_samples, add_samples, save, load, update_metadata, get_metadata, get_buffer_length and its length"
        raise AttributeError(f"data_source has no {name} in a rollout function: prompts come from the buffer as tasks; it has {there}")

    # --- the end of a call

    def hand_in(self, returned: ReturnedGroup) -> str | None:
        """Hands a finished group in. Returns why it is not taken, None where it is."""
        drawn = self._drawn.get(returned.number)
        if drawn is None:
            return f"group_index {returned.number} is no group that get_samples gave and that is still out"
        if not _done(returned.samples):
            self._leave(drawn, "fail", reason=(reason := "it came back without a token or a status"))
            return reason
        if any(status_of(sample.status) not in _ENDED for sample in returned.samples):
            self.give_back(drawn, returned.samples)
            return None
        if all(sample.remove_sample for sample in returned.samples):
            self._leave(drawn, "discard", reason="every sample of it was removed")
            return None
        try:
            stored = self._stored(drawn, returned.samples, returned.rollouts)
            blobs = sample_codec.encode(stored, self._config.store.blob_bytes)
        except BadMessage as error:
            self._leave(drawn, "fail", reason=str(error))
            return str(error)
        self._leave(drawn, "hand_in", samples=blobs)
        return None

    def give_back(self, drawn: DrawnGroup, samples: Sequence[HookSample]) -> None:
        """Gives a group back with what its samples have; with nothing, where that is not fit to be continued from."""
        blobs: list[bytes] = []
        if len(samples) == self._n and any(sample.response_length for sample in samples):
            try:
                blobs = sample_codec.encode(self._stored(drawn, samples, range(self._n)), self._config.store.blob_bytes)
            except BadMessage as error:
                print(f"group {drawn.group} goes back without its tokens: {error}", flush=True)
        self._leave(drawn, "give_back", samples=blobs)

    def discard_unheld(self, reason: str) -> None:
        """Reports the groups that the function cannot hand in any more."""
        for drawn in [drawn for drawn in list(self._drawn.values()) if not drawn.held]:
            self._leave(drawn, "discard", reason=reason)

    # --- inside

    def _leave(self, drawn: DrawnGroup, verb: str, **fields: Any) -> None:
        with self._lock:
            self._drawn.pop(drawn.number, None)
        self._calls.call(verb, group=drawn.group, attempt=drawn.attempt, **fields)

    def _starving(self, started: float, loop: asyncio.AbstractEventLoop | None) -> bool:
        drawn = list(self._drawn.values())
        if not drawn:
            return False
        if all(group.finished for group in drawn if group.held):
            since = self._all_finished_at = self._all_finished_at or time.monotonic()
            return loop is None or self._spinning.get(id(loop), 0) > 0 or (self.in_call and time.monotonic() - since > FINISHED_S)
        self._all_finished_at = None
        waited = time.monotonic() - started
        return waited > PATIENCE_S if loop is None else self._spinning.get(id(loop), 0) > 1

    def _gives_way(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns whether a call on an event loop returns without prompts: it does once, unless nothing else can continue there. A caller
        that comes back before its loop has run anything else would never let what it waits for be generated."""
        with self._lock:
            first = id(loop) not in self._spinning
            self._spinning[id(loop)] = self._spinning.get(id(loop), 0) + 1
        if first:
            loop.call_soon(self._spinning.pop, id(loop), None)
        return first and bool(self._drawn)

    def _taken(self, entry: dict[str, Any], version: int) -> list[HookSample]:
        token = _Token()
        drawn = DrawnGroup(entry["group"], entry["number"], entry["attempt"], version, weakref.ref(token))
        samples = [self._sample(entry, index) for index in range(self._n)]
        for stored in sample_codec.decode(entry["partial"]):
            _continue(samples[stored.rollout], stored)
        drawn.begun = min([drawn.begun, *(min(sample.weight_versions) for sample in samples if sample.weight_versions)])
        for sample in samples:
            sample.session_id = session = _SessionId(sample.session_id)
            session.token = token
        drawn.samples = [weakref.ref(sample) for sample in samples]
        with self._lock:
            self._drawn[drawn.number] = drawn
        return samples

    def _sample(self, entry: dict[str, Any], index: int) -> HookSample:
        number = entry["number"] * self._n + index
        return HookSample(
            group_index=entry["number"],
            index=number,
            rollout_id=number,
            session_id=f"{entry['group']}.{entry['attempt']}.{index}",
            prompt=entry["prompt"] if isinstance(entry["prompt"], str) else [dict(message) for message in entry["prompt"]],
            tokens=list(entry["tokens"]),
            label=entry["label"],
            metadata=dict(entry["metadata"]),
        )

    def _stored(self, drawn: DrawnGroup, samples: Sequence[HookSample], rollouts: Sequence[int]) -> list[StoredSample]:
        served = self._calls.call("served", begun=drawn.begun)
        versions = Served(drawn.begun, served["newest"], frozenset(served["late"]))
        reader, kept = self._config.log_probs_reader, self._config.kept_top_k > 0
        limits = SampleLimits(served["vocabulary"], log_probs_reader=reader, choices=self._choices, kept=kept)
        stored = []
        for index, (sample, rollout) in enumerate(zip(samples, rollouts, strict=True)):
            if status_of(sample.status) is Status.PENDING:
                sample.status = Status.ABORTED
            stored.append(to_stored(sample, drawn.group, index, rollout, versions, limits, unfinished=True))
        return stored


def _continue(sample: HookSample, stored: StoredSample) -> None:
    earlier, own = vars(from_stored(stored)), ("group_index", "index", "rollout_id", "session_id", "turns")
    vars(sample).update({name: value for name, value in earlier.items() if name not in own})
    sample.status = sample.status if stored.finish != "abort" or len(stored.response) else Status.PENDING


def _flat(group: Sequence[Any]) -> list[HookSample]:
    return [sample for item in group for sample in (_flat(item) if isinstance(item, list) else [item])]


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


FIELD = "rollout.rollout_function_path"


def main() -> None:
    """Calls the function whenever the service says so, until that is gone."""
    channel = FrameStream()
    call_id, setup = channel.receive()
    config = RunConfig.model_validate_json(setup["config"])
    try:
        function = load(FIELD, paths(config, "rollout")[FIELD])
    except ConfigError as error:
        channel.send([call_id, {"refused": [error.field, str(error.value), error.expected]}])
        return
    channel.send([call_id, {}])
    calls = ServiceCalls(channel)
    groups = DrawnGroups(calls, config, setup["prompts"])
    args = Arguments(config)
    while True:
        order = calls.call("next")
        vars(args).update(order["args"])
        args.point_at(args.sglang_router_ip, args.sglang_router_port)
        groups.in_call = True
        try:
            returned = function(args, order["rollout_id"], groups, evaluation=False)
            output = train_output(asyncio.run(returned) if inspect.iscoroutine(returned) else returned)
            finished = returned_groups(output.samples)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # it is the user's code
            print_traceback()
            calls.call("failed", error=error_text(error, function))
            os._exit(1)  # with the threads that it may have started: what they have in hand goes back
        groups.in_call = False
        refused = [problem for group in finished if (problem := groups.hand_in(group)) is not None]
        metrics = metric_numbers(output.metrics)
        del returned, output, finished
        gc.collect()  # what the function may still hand in is what is still referenced
        groups.discard_unheld("the rollout function did not hand it in")
        calls.call("finished", rollout_id=order["rollout_id"], refused=refused, metrics=metrics)


if __name__ == "__main__":
    main()
