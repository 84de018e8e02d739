"""Decides what the next training step of a run waits for: the first cause that applies, in one order for all who ask. Pure.

The order goes from what takes everything down (a full disk, the bus) over services that are down, silent or not ready yet, to what every
run does all the time: push weights, train, wait for a batch. A cause looks into the `RunSituation` alone, and asks no clock.
"""

from collections.abc import Callable, Sequence

from shared.bus.registry import NODE, STANDBY, WAITING
from shared.live.live_services import needed, warm_start
from shared.live.stall import NATS, STORE, Cause, RunSituation, Stall, StallWatch, named
from shared.live.text import number, shortened_line
from shared.runtime.activities import BATCH, LOOP, PUSH, WORK
from shared.runtime.child_process import cause
from shared.schema.service_messages import ServiceStatus

ALONE = frozenset({"buffer", "trainer", "critic"})
"""Kinds of services of which the run needs the very one that is down: nobody else has its work."""

RUN_FAILED = "run failed"
"""The state of a buffer whose run has failed."""

UNTAKEN = (("queue_task", "rollout", "running_groups", "generate"), ("queue_generated", "reward", "scoring", "score"))
"""Queues: the buffer's gauge of what waits, who takes it, the gauge of what these have in hand, and what they do with it."""

NAMES_SHOWN = 4

Look = Callable[[RunSituation], Stall | None]


def watched_stall(watch: StallWatch, situation: RunSituation, now: float) -> Stall:
    """Returns what the run waits for, with its beginning and that of the newest step. ``now``: seconds since the epoch."""
    return watch.see(run_stall(situation), now, situation.steps)


def run_stall(now: RunSituation) -> Stall:
    """Returns what the next training step waits for."""
    return next(filter(None, (look(now) for look in IN_ORDER)), Stall(Cause.STEP, "a training step"))


# --- what all services need


def _disk(now: RunSituation) -> Stall | None:
    return Stall(Cause.DISK, f"room on the disk ({now.disk})") if now.disk else None


def _servers(now: RunSituation) -> Stall | None:
    gone = [(name, kind, now.away[name]) for name, kind in ((NATS, Cause.BUS), (STORE, Cause.STORE)) if name in now.away]
    if not gone:
        return None
    words = "; and for ".join(f"{name}, which is away: {shortened_line(away.why)}" for name, _, away in gone)
    follows = next((away.next_action for _, _, away in gone if away.next_action), "every service asks again until it is back")
    return Stall(gone[0][1], words, min(away.since for _, _, away in gone), follows)


def _told(now: RunSituation) -> Stall | None:
    """The launcher sees its processes, their exit codes, and the disk."""
    return now.told


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
            again = f"starts again in {instance.due_in:.0f} s" + _from_checkpoint(instance.service)
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
        service = _kind_of(now, status_instance)
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


def _starting_engines(now: RunSituation) -> list[ServiceStatus]:
    """Returns the replicas whose engines start, where that holds up the run."""
    rollouts = [status for status in now.statuses if status.service == "rollout"]
    if not now.config.trainer.colocate and any(status.version >= 0 for status in rollouts):
        return []
    return [status for status in rollouts if status.state == "starting"]


# --- services that are there and do not go on


def _room(now: RunSituation) -> Stall | None:
    for status in now.statuses:
        if status.held_back:
            return Stall(Cause.ROOM, f"room: {status.instance} holds back ({status.held_back})")
    return None


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
    """A worker that may have groups of the batch, and does not go on with them."""
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
    """Returns the queues that hold groups while nobody works on them."""
    found, gauges = [], now.buffer
    for queue, service, gauge, verb in UNTAKEN:
        workers = [status for status in now.statuses if status.service == service]
        busy = sum(status.gauges.get(gauge, 0.0) for status in workers)
        if gauges.get(queue, 0.0) > 0 and not busy and workers:
            states = ", ".join(f"{status.instance} {status.state}" for status in workers[:NAMES_SHOWN])
            found.append(f"{number(gauges[queue])} groups to {verb} are taken by nobody ({states})")
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
    _disk,
    _servers,
    _told,
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
    _weights,
    _environments,
    _batch,
    _evaluation,
    _step,
)


# --- what several causes ask


def _stood_in(now: RunSituation, service: str, instance: str) -> bool:
    """Returns whether another service of the kind is at work, so that the run goes on without this one."""
    if service in ALONE and service != "buffer":
        return False
    if service == "rollout" and now.config.trainer.colocate:  # the trainer computes on the GPUs of all of them
        return False
    others = (status for status in now.statuses if status.service == service and status.instance != instance)
    return any(status.state not in (STANDBY, "starting", "stopping") and status.instance not in now.silent for status in others)


def _kind_of(now: RunSituation, instance: str) -> str:
    known = {item.instance: item.service for item in now.instances} | {status.instance: status.service for status in now.statuses}
    return known.get(instance, instance.rsplit("-", 1)[0])


def _after_silence(now: RunSituation, instance: str) -> str:
    if any(item.instance == instance and not item.foreign for item in now.instances):
        return f"killed and started again {now.config.bus.frozen_timeout:g} s after its last one"
    return f"taken for gone {now.config.bus.registry_ttl:g} s after its last one"


def _from_checkpoint(service: str) -> str:
    return ", from its newest checkpoint" if service in ("trainer", "critic") else ""


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
