"""What a run waits for at one moment: for what and from which service, since when, and what happens next. Pure.

Displays, logs, the console and reports have their words from here. The first cause that applies decides, in one order for all: from
what takes everything down (a full disk, the bus) over services that are down, silent or not ready yet, to what every run does all the time:
push weights, train, wait for a batch. A cause reads the `RunSituation` alone, and asks no clock.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from shared.bus.registry import ENVIRONMENT, NODE, STANDBY, WAITING
from shared.config.run_config import RunConfig
from shared.process.child_process import cause
from shared.runtime.safe_text import duration, number, shortened_line
from shared.schema.service_messages import BATCH, LOOP, PUSH, WORK, Doing, ServiceStatus
from shared.view.live_services import InstanceStatus, needed, newest_gauges, present, shown, trained_steps, warm_start

NATS, STORE = "NATS", "Redis"  # The servers, as displays name them
LONG_S = 10.0  # Seconds after which an ordinary wait is worth a line of its own, where nothing is redrawn


class Cause(Enum):
    """Why a run waits; each value is how a log line names it."""

    DISK = "the disk is full"
    BUS = "the bus is away"
    STORE = "the store is away"
    FAILED = "the run has failed"
    DOWN = "a service is down"
    SILENT = "a service is silent"
    STARTING = "services start"
    ABSENT = "a kind of service is missing"
    LOADING = "a service gets ready"
    FINAL_WEIGHTS = "the final weights are written"
    ROOM = "there is no room"
    WEIGHTS = "no weights are served"
    ENVIRONMENT = "an environment is away"
    PUSH = "weights are pushed"
    TRAINING = "the trainer is at work"
    STUCK = "work does not continue"
    BATCH = "a batch is not complete"
    EVALUATION = "an evaluation is not complete"
    STEP = "a step begins"
    CLIENTS = "clients train"


# Causes that are worth a line at once: no healthy run has them
TROUBLES = frozenset({Cause.DISK, Cause.BUS, Cause.STORE, Cause.FAILED, Cause.DOWN, Cause.SILENT, Cause.ROOM, Cause.STUCK})


@dataclass(frozen=True)
class Away:
    """Since when something is away (seconds since the epoch), why, and what happens next; empty: it is waited for."""

    since: float
    why: str
    next_action: str = ""


@dataclass(frozen=True)
class PendingWork:
    """What a finished run still waits for, since when (seconds since the epoch), and what happens if it does not come."""

    what: str
    since: float
    next_action: str


@dataclass(frozen=True)
class Stall:
    """A wait. ``awaited``: what for, in words that follow "waiting for"; ``since``: seconds since the epoch, 0: not known.

    ``still_since``: when the run's newest step was first seen, 0: not known. One wait may follow another without a step between them.
    """

    cause: Cause
    awaited: str
    since: float = 0.0
    next_action: str = ""
    still_since: float = 0.0

    @property
    def key(self) -> tuple[Cause, str]:
        """Returns what stays the same while the wait does, but for the numbers in its words."""
        return self.cause, "".join(letter for letter in self.awaited if not letter.isdigit())

    def lasted(self, now: float) -> float:
        """Returns the seconds that it lasts, 0 where that is not known."""
        return max(0.0, now - self.since) if self.since else 0.0

    def still(self, now: float) -> float:
        """Returns the seconds since the newest step was first seen, 0 where that is not known."""
        return max(0.0, now - self.still_since) if self.still_since else 0.0

    def words(self, now: float, *, clock: bool = True) -> str:
        """Returns the whole sentence after "waiting for". ``now``: seconds since the epoch. ``clock``: with this process's time of day."""
        at = f" (since {time.strftime('%H:%M:%S', time.localtime(self.since))})" if clock else ""
        since = f", for {duration(self.lasted(now))}{at}" if self.since else ""
        step = f", no new step for {duration(self.still(now))}" if self.lasted(now) < LONG_S <= self.still(now) else ""
        return f"{self.awaited}{since}{step}" + (f"; {self.next_action}" if self.next_action else "")

    def worth_a_line(self, now: float) -> bool:
        """Returns whether it is out of the ordinary, or one of several that have followed each other for long."""
        return self.cause in TROUBLES or (self.cause is not Cause.CLIENTS and max(self.lasted(now), self.still(now)) >= LONG_S)


@dataclass(frozen=True)
class RunSituation:
    """What is known of a run.

    ``statuses``: of live services, those of environments aside; ``environments``: theirs. ``instances``: the launcher's own processes,
    empty elsewhere. ``away``: server → since when, and why. ``silent``: instance → since when its heartbeat is missing. ``errors``:
    instance → the error that its last life ended with. ``disk``: what to say of a full one. ``failure``: why the run has failed.
    ``reported``: the wait that the launcher reports, which knows more than others. ``owed``: what is still missing of a finished run.
    """

    config: RunConfig
    statuses: Sequence[ServiceStatus]
    environments: Sequence[ServiceStatus] = ()
    instances: Sequence[InstanceStatus] = ()
    away: Mapping[str, Away] = field(default_factory=dict)
    silent: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    disk: str = ""
    failure: str = ""
    reported: Stall | None = None
    owed: PendingWork | None = None

    @classmethod
    def of(
        cls, config: RunConfig, services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus] = (), **known: Any
    ) -> "RunSituation":
        """Returns the situation by what the registry holds; ``known``: further fields."""
        there = [shown(status) for status in present(services, instances)]
        statuses = [status for status in there if status.service != ENVIRONMENT]
        return cls(config, statuses, [status for status in there if status.service == ENVIRONMENT], instances, **known)

    @property
    def buffer(self) -> dict[str, float]:
        """Returns the gauges of the active buffer."""
        return newest_gauges(self.statuses, "buffer")

    @property
    def steps(self) -> int:
        """Returns how many steps are trained, as far as services report; -1 if none is ever trained or none reports."""
        return -1 if self.config.debug.debug_rollout_only else trained_steps(self.statuses)

    def doing(self, part: str) -> list[tuple[ServiceStatus, Doing]]:
        """Returns what that part of each service does, the oldest first."""
        found = [(status, item) for status in self.statuses for item in status.doing if item.part == part]
        return sorted(found, key=lambda entry: entry[1].since)


RUN = "run"  # The part of the launcher that reports what the run waits for (`shared.schema.service_messages.Doing`)


def reported_wait(launcher: ServiceStatus | None) -> Stall | None:
    """Returns the wait that a launcher's status reports."""
    doing = next((item for item in shown(launcher).doing if item.part == RUN), None) if launcher is not None else None
    if launcher is None or doing is None or launcher.state not in Cause.__members__:
        return None
    return Stall(Cause[launcher.state], doing.what, doing.since, doing.next_action)


def as_doing(found: Stall) -> Doing:
    """Returns the wait as the launcher's status has it, beside the state, which is the cause's name."""
    return Doing(part=RUN, what=found.awaited, since=found.since, next_action=found.next_action)


class StallWatch:
    """Follows one wait after another: gives each that does not know its beginning the time when it was first seen, and all of them that
    of the newest step."""

    def __init__(self) -> None:
        self._key: tuple[Cause, str] | None = None
        self._since = 0.0
        self._steps, self._still_since = -1, 0.0

    def follow(self, found: Stall, now: float, steps: int = -1) -> Stall:
        """Returns the wait with its beginning. ``now``: seconds since the epoch; ``steps``: trained so far, as far as known."""
        if found.key != self._key:
            self._key, self._since = found.key, now
        if steps > self._steps:
            self._steps, self._still_since = steps, now
        return replace(found, since=found.since or self._since, still_since=self._still_since)


def named(error: str) -> str:
    """Returns an error as a part of a sentence."""
    return f" ({shortened_line(error)})" if error else ""


# Kinds of services of which the run needs the very one that is down: no other has its work
ALONE = frozenset({"buffer", "trainer", "critic"})

RUN_FAILED = "run failed"  # The state of a buffer whose run has failed

# Queues: the buffer's gauge of what waits, who takes it, the gauge of what these have in hand, and what they do with it
UNTAKEN = (("queue_task", "rollout", "running_groups", "generate"), ("queue_generated", "reward", "scoring", "score"))

NAMES_SHOWN = 4

Look = Callable[[RunSituation], Stall | None]


def watched_stall(watch: StallWatch, situation: RunSituation, now: float) -> Stall:
    """Returns what the run waits for, with its beginning and that of the newest step. ``now``: seconds since the epoch."""
    return watch.follow(run_stall(situation), now, situation.steps)


def run_stall(now: RunSituation) -> Stall:
    """Returns what the next training step waits for."""
    return next(filter(None, (look(now) for look in IN_ORDER)), Stall(Cause.STEP, "a training step"))


# --- what all services need


def _servers(now: RunSituation) -> Stall | None:
    gone = [(name, kind, now.away[name]) for name, kind in ((NATS, Cause.BUS), (STORE, Cause.STORE)) if name in now.away]
    if not gone:
        return None
    words = "; and for ".join(f"{name}, which is away: {shortened_line(away.why)}" for name, _, away in gone)
    follows = next((away.next_action for _, _, away in gone if away.next_action), "every service asks again until it is back")
    return Stall(gone[0][1], words, min(away.since for _, _, away in gone), follows)


def _failed(now: RunSituation) -> Stall | None:
    reason = now.failure or next((status.detail for status in now.statuses if status.state == RUN_FAILED), "")
    return Stall(Cause.FAILED, f"nothing any more: the run has failed{named(reason)}") if reason else None


def _owed(now: RunSituation) -> Stall | None:
    """A finished run needs its trainer alone."""
    if now.owed is None:
        return None
    down = next((item for item in now.instances if item.service == "trainer" and item.due_in is not None), None)
    who = "" if down is None else f" from {down.instance}, which ended with {down.last_error or cause(down.last_code)}"
    return Stall(Cause.FINAL_WEIGHTS, now.owed.what + who, now.owed.since, now.owed.next_action)


# --- services that are not there


def _down(now: RunSituation) -> Stall | None:
    """A process that has ended, and that no other one stands in for."""
    for instance in now.instances:
        if instance.due_in is not None and not _stood_in(now, instance.service, instance.instance):
            ended = instance.last_error or cause(instance.last_code)
            again = f"starts again in {instance.due_in:.0f} s"
            again += ", from its newest checkpoint" if instance.service in ("trainer", "critic") else ""
            return Stall(Cause.DOWN, f"{instance.instance}, which ended with {ended}", instance.ended_at, again)
    return None


def _nodes(now: RunSituation) -> Stall | None:
    """Nodes of a trainer that wait for others; of those that all wait for a first one, one."""
    waiting = [status for status in now.statuses if status.service == NODE and status.state == WAITING and status.detail]
    first = [status for status in waiting if status.instance.endswith("-node-0")] or waiting[:1]
    words = "; ".join(f"{status.instance}, {status.state} {status.detail}" for status in first)
    return Stall(Cause.STARTING, words, min(status.state_since for status in first)) if first else None


def _silent(now: RunSituation) -> Stall | None:
    """A service whose heartbeat is missing, and that no other one stands in for: it is frozen, or its machine is gone."""
    for status_instance, since in sorted(now.silent.items(), key=lambda item: item[1]):
        known = {item.instance: item.service for item in now.instances} | {status.instance: status.service for status in now.statuses}
        service = known.get(status_instance, status_instance.rsplit("-", 1)[0])
        if not _stood_in(now, service, status_instance):
            return Stall(Cause.SILENT, f"{status_instance}, whose heartbeat is missing", since, _after_silence(now, status_instance))
    return None


def _starting(now: RunSituation) -> Stall | None:
    names = {status.instance for status in now.statuses}
    absent = [item for item in now.instances if item.instance not in names and not item.foreign and item.instance not in now.silent]
    waited = [item for item in absent if not _stood_in(now, item.service, item.instance)]
    if not waited:
        return None
    again = next((f", after {item.last_error}" for item in waited if item.last_error), "")
    since = min(item.started_at for item in waited)
    return Stall(Cause.STARTING, f"{', '.join(item.instance for item in waited)} to start{again}", since)


def _kind_of_service(now: RunSituation) -> Stall | None:
    at_work = {status.service for status in now.statuses if status.state != STANDBY}
    kind = next((kind for kind in needed(now.config) if kind not in at_work), None)
    if kind is None:
        return None
    last = next((f"; the last one: {name}{named(error)}" for name, error in now.errors.items() if name.startswith(f"{kind}-")), "")
    standby = next((status.instance for status in now.statuses if status.service == kind and status.state == STANDBY), None)
    takes_over = f"{standby} takes over once the lease has run out ({now.config.bus.lease_duration:g} s)" if standby else ""
    since = now.away[kind].since if kind in now.away else 0.0
    return Stall(Cause.ABSENT, f"a {kind} service{last}", since, takes_over)


def _getting_ready(now: RunSituation) -> Stall | None:
    """Engines that start, where no other one serves; a trainer or critic that loads."""
    engines = _starting_engines(now)
    trainers = [status for status in now.statuses if status.service in ("trainer", "critic") and status.state != "ready"]
    named_engines = [f"{status.instance} ({status.detail})" if status.detail else status.instance for status in engines]
    parts = [f"engine of {_listed(named_engines)} starting{_last_error(now, engines)}"] if engines else []
    if warm_up := warm_start(now.statuses):
        parts.append(warm_up)
    else:
        parts += [f"{status.instance} {status.state}{_last_error(now, [status])}" for status in trainers]
    if not parts:
        return None
    begun = [status.state_since for status in (*engines, *trainers) if status.state_since]
    limit = f"an engine is given up after {now.config.rollout.engine_start_timeout:g} s, and started again" if engines else ""
    return Stall(Cause.LOADING, "; ".join(parts), min(begun, default=0.0), limit)


# --- services that are there and do not continue


def _starting_engines(now: RunSituation) -> list[ServiceStatus]:
    """Returns the replicas whose engines start, where that holds up the run."""
    rollouts = [status for status in now.statuses if status.service == "rollout"]
    if not now.config.trainer.colocate and any(status.version >= 0 for status in rollouts):
        return []
    return [status for status in rollouts if status.state == "starting"]


def _room(now: RunSituation) -> Stall | None:
    for status in now.statuses:
        if status.held_back:
            return Stall(Cause.ROOM, f"room: {status.instance} holds back ({status.held_back})")
    return None


def _clients(now: RunSituation) -> Stall | None:
    """A run of `myxo serve` has no steps of its own."""
    if not now.config.tinker.tinker_endpoint:
        return None
    waiting = newest_gauges(now.statuses, "gateway").get("commands_waiting", 0)
    return Stall(Cause.CLIENTS, f"{number(waiting)} commands of clients to be carried out" if waiting else "commands of clients")


def _weights(now: RunSituation) -> Stall | None:
    """No replica serves: one that is updated by a push is the push's matter, one that the trainer has put to sleep the trainer's."""
    served = any(status.service == "rollout" and status.version >= 0 for status in now.statuses)
    if served and now.buffer.get("live_version", -1) >= 0:
        return None
    if _trainer_works(now) or now.doing(PUSH):
        return None
    states = [f"{status.instance} {status.state}" for status in now.statuses if status.service in ("trainer", "rollout")]
    begun = [status.state_since for status in now.statuses if status.service == "rollout" and status.state_since]
    return Stall(Cause.WEIGHTS, f"weights to be served ({', '.join(states)})", max(begun, default=0.0))


def _push(now: RunSituation) -> Stall | None:
    if _trainer_works(now):
        return None
    for status, doing in now.doing(PUSH):
        if doing.awaited_from:
            return Stall(Cause.PUSH, f"{_listed(doing.awaited_from)} to answer the {doing.what}", doing.since, doing.next_action)
        return Stall(Cause.PUSH, f"the {doing.what} by {status.instance}", doing.since, doing.next_action)
    return None


def _environments(now: RunSituation) -> Stall | None:
    away = [status for status in now.environments if status.state in ("away", "refused")]
    parts = [f"environment {status.instance} ({status.state}: {status.detail})" for status in away]
    since = min((status.state_since for status in away if status.state_since), default=0.0)
    return Stall(Cause.ENVIRONMENT, "; ".join(parts), since, "it is asked again and again") if parts else None


def _training(now: RunSituation) -> Stall | None:
    for status, doing in now.doing(LOOP):
        if not doing.awaited_from:
            return Stall(Cause.TRAINING, f"{status.instance}, {doing.what}", doing.since, doing.next_action)
    return None


def _other_role(now: RunSituation) -> Stall | None:
    """The trainer waits for the critic, or the critic for the trainer."""
    for status, doing in now.doing(LOOP):
        if set(doing.awaited_from) & {"critic", "trainer"}:
            return Stall(
                Cause.TRAINING, f"{doing.what} from the {doing.awaited_from[0]}, for {status.instance}", doing.since, doing.next_action
            )
    return None


# --- a batch that is not complete


def _batch(now: RunSituation) -> Stall | None:
    size = now.config.rollout.rollout_batch_size
    ready = now.buffer.get("ready", size)
    if not now.config.rollout.num_rollout or ready >= size:
        return None
    what = f"a batch ({number(ready)} of {size} groups ready)"
    return _stuck(now, what) or _under_way(now, what)


def _stuck(now: RunSituation, what: str) -> Stall | None:
    """A worker that may have groups of the batch, and does not continue them."""
    stuck = [(status, doing) for status, doing in now.doing(WORK) if doing.stuck]
    words = [*(f"{status.instance}, {doing.what}" for status, doing in stuck), *_gone_workers(now)]
    if not words:
        return None
    since = stuck[0][1].since if stuck else min(now.silent.values(), default=0.0)
    return Stall(Cause.STUCK, f"{what}: {'; '.join(words)}", since, stuck[0][1].next_action if stuck else "")


def _under_way(now: RunSituation, what: str) -> Stall:
    """Where the groups are that the batch lacks, and what the buffer says of them."""
    asked = next((doing for _, doing in now.doing(BATCH)), None)
    workers, untaken = now.doing(WORK), _untaken(now)
    parts = [*untaken, *(f"{status.instance} {doing.what}" for status, doing in workers[:NAMES_SHOWN])]
    parts += [asked.what] if asked is not None else []
    follows = workers[0][1].next_action if workers and not untaken else ""
    since = next((doing.since for doing in (asked, *(doing for _, doing in now.doing(LOOP))) if doing is not None), 0.0)
    return Stall(Cause.BATCH, ": ".join(filter(None, [what, "; ".join(parts)])), since, follows)


def _gone_workers(now: RunSituation) -> list[str]:
    """Returns who may have groups of the batch and is silent or down, although others of its kind work."""
    down = [f"{item.instance}, which is down{named(item.last_error)}" for item in now.instances if item.due_in is not None]
    silent = [f"{name}, whose heartbeat is missing ({_after_silence(now, name)})" for name in now.silent]
    return [text for text in (*down, *silent) if text.startswith(("rollout", "reward", "gateway", "agents"))]


def _untaken(now: RunSituation) -> list[str]:
    """Returns the queues that hold groups while no service works on them."""
    found, gauges = [], now.buffer
    for queue, service, gauge, verb in UNTAKEN:
        workers = [status for status in now.statuses if status.service == service]
        busy = sum(status.gauges.get(gauge, 0.0) for status in workers)
        if service == "rollout" and now.config.ingest.ingest_groups == "alone" and gauges.get(queue, 0.0) > 0:
            found.append(f"{number(gauges[queue])} groups are to be handed in from outside (POST /groups at a gateway)")
        elif gauges.get(queue, 0.0) > 0 and not busy and workers:
            states = ", ".join(f"{status.instance} {status.state}" for status in workers[:NAMES_SHOWN])
            found.append(f"{number(gauges[queue])} groups to {verb} are not taken by any service ({states})")
    return found


def _evaluation(now: RunSituation) -> Stall | None:
    pending = now.buffer.get("eval_pending", 0)
    if not pending:
        return None
    limit = f"what is late is left out, at the latest after eval.eval_timeout = {now.config.eval.eval_timeout:g} s"
    return Stall(Cause.EVALUATION, f"evaluations ({number(pending)} prompts outstanding)", 0.0, limit)


def _step(now: RunSituation) -> Stall | None:
    """The batch is there, and the trainer has not told yet that it trains it."""
    for status, doing in now.doing(LOOP):
        return Stall(Cause.STEP, f"{status.instance}, which waits for {doing.what}", doing.since, doing.next_action)
    return None


IN_ORDER: Sequence[Look] = (
    lambda now: Stall(Cause.DISK, f"room on the disk ({now.disk})") if now.disk else None,
    _servers,
    lambda now: now.reported,  # the launcher sees its processes, their exit codes, and the disk
    _failed,
    _owed,
    _down,
    _silent,
    _nodes,
    _room,
    _starting,
    _kind_of_service,
    _getting_ready,
    _training,
    _other_role,
    _push,
    _clients,
    _weights,
    _environments,
    _batch,
    _evaluation,
    _step,
)


# --- what several causes ask


def _stood_in(now: RunSituation, service: str, instance: str) -> bool:
    """Returns whether another service of the kind is at work, so that the run continues without this one."""
    if service in ALONE and service != "buffer":
        return False
    if service == "rollout" and now.config.trainer.colocate:  # the trainer computes on the GPUs of all of them
        return False
    others = (status for status in now.statuses if status.service == service and status.instance != instance)
    return any(status.state not in (STANDBY, "starting", "stopping") and status.instance not in now.silent for status in others)


def _after_silence(now: RunSituation, instance: str) -> str:
    if any(item.instance == instance and not item.foreign for item in now.instances):
        return f"killed and started again {max(now.config.bus.frozen_timeout, now.config.bus.registry_ttl):g} s after its last one"
    return f"taken for gone {now.config.bus.registry_ttl:g} s after its last one"


def _trainer_works(now: RunSituation) -> bool:
    return any(status.service == "trainer" and not doing.awaited_from for status, doing in now.doing(LOOP))


def _last_error(now: RunSituation, statuses: Sequence[ServiceStatus]) -> str:
    """Returns why the first of these that was started again had ended."""
    own = {item.instance: item.last_error for item in now.instances if item.last_error}
    errors = {**now.errors, **own}
    return next((f", after {errors[status.instance]}" for status in statuses if status.instance in errors), "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more
