"""Who waits for whom in a run, and what would help: one sentence and its advice, from how the last steps came about. Pure.

Of a trainer's time each second is one of two: it trains, or it waits for a cause (`shared.view.flow_history`). The sentence names the
largest wait; where the trainer hardly waits, it says whether replicas do. Advice rests on premises: a larger staleness bound presumes that
old tokens can be trained well, more replicas that pushes reach them in time. While an alarm says otherwise, the advice is withheld.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.config.run_config import RunConfig
from shared.view.alarms import AlarmKind
from shared.view.flow_history import (
    ADMISSION,
    GENERATION,
    HANDING_OUT,
    PUSHING,
    QUEUE,
    RESTARTING,
    SAVING,
    SCORING,
    ActivitySpan,
    FlowHistory,
    GroupPassage,
    Interval,
    StepRecord,
    laid_over,
    union,
    wait_causes,
)

LITTLE = 0.10  # A share of the time that is not worth a change
IDLE = 0.25  # Replicas that generate nothing for this share of the time lack groups
QUEUED = 0.2  # Replicas are full where the awaited groups spent this part of their way, from admission to their last token, in the queue
SLOW = 2.0  # A replica is slow that takes this many times as long for a group as the others do
MOST_OF_WAIT = 0.8  # The replicas are named that make up this share of the wait for all
SATURATED = 0.5  # Cores are what lacks where some process waits for one for this share of the time
FEW_STEPS = 2  # The least steps that say something about a run
NAMES_SHOWN = 3


@dataclass(frozen=True)
class Workload:
    """How the steps of a window came about.

    ``waits``: share of the trainer's time that it waited for each cause. ``awaited``: the replicas that made up most of its wait for
    rollout, the longest wait first. ``replicas``: share of the time in which each generated; ``slow``: the awaited ones that take so many
    times as long for a group as the others. ``queued``: part of the awaited groups' way, from admission to the last
    token, before a replica took them. ``lost_tokens``: share of generated tokens that were not trained. ``blocked``: what keeps the run
    from happening now, in words; empty: nothing. ``cores_awaited``: share of the time in which some process waited for a core.
    """

    steps: int
    waits: Mapping[str, float]
    awaited: Sequence[str]
    replicas: Mapping[str, float]
    queued: float = 0.0
    slow: Mapping[str, float] = field(default_factory=dict)
    lost_tokens: float = 0.0
    blocked: str = ""
    cores_awaited: float = 0.0

    @property
    def waiting(self) -> float:
        """Returns the share of its time that the trainer waited."""
        return sum(self.waits.values())

    @property
    def idle(self) -> float:
        """Returns the share of the time in which a replica generated nothing, in the mean."""
        return 1 - sum(self.replicas.values()) / len(self.replicas) if self.replicas else 0.0


@dataclass(frozen=True)
class Advice:
    """What would help. ``withheld``: why it is not given now; empty: it is."""

    text: str
    withheld: str = ""


@dataclass(frozen=True)
class Bottleneck:
    """``waiting``: who waits; ``waiting_for``: for whom; ``share``: of the time. Empty and 0 where none waits, or nothing is known."""

    sentence: str
    advice: tuple[Advice, ...] = ()
    waiting: str = ""
    waiting_for: str = ""
    share: float = 0.0


@dataclass(frozen=True)
class _Remedy:
    """Advice with the alarms that take its premise away."""

    text: str
    forbidden_by: frozenset[AlarmKind]


def bottleneck(load: Workload, config: RunConfig, alarmed: Collection[AlarmKind]) -> Bottleneck:
    """Returns who waits for whom in a run, and what would help while these kinds of alarms stand."""
    if load.blocked:
        return Bottleneck(f"The run waits for {load.blocked}.", waiting="the run", waiting_for=load.blocked, share=1.0)
    if load.steps < FEW_STEPS:
        return Bottleneck("Too few steps were trained to say who waits for whom: this needs two within the time shown.")
    if load.waiting >= LITTLE:
        found, remedies = _trainer_waits(load, config)
    else:
        found, remedies = _trainer_busy(load, config)
    if load.cores_awaited >= SATURATED and found.waiting:  # further replicas and ranks would share the same cores
        cores = f"more cores are what lacks: in {_percent(load.cores_awaited)} of the last minute some process waited for one"
        others = [remedy for remedy in remedies if remedy.forbidden_by not in (REPLICAS, HARDWARE)]
        remedies = [_Remedy(f"{cores}; else fewer services on this machine", frozenset()), *others]
    remedies += _losses(load, config)
    advice = []
    for remedy in remedies:
        reasons = [kind.value for kind in AlarmKind if kind in remedy.forbidden_by and kind in alarmed]
        advice.append(Advice(remedy.text, f"first see to the alarm: {' and '.join(reasons)}" if reasons else ""))
    return Bottleneck(found.sentence, tuple(advice), found.waiting, found.waiting_for, found.share)


# --- the trainer waits


def _trainer_waits(load: Workload, config: RunConfig) -> tuple[Bottleneck, list[_Remedy]]:
    parts = {
        "its restarts": load.waits.get(RESTARTING, 0.0),
        "its checkpoints": load.waits.get(SAVING, 0.0),
        "pushes of weights": load.waits.get(PUSHING, 0.0),
        "rollout": sum(load.waits.get(cause, 0.0) for cause in (ADMISSION, QUEUE, GENERATION)),
        "reward": load.waits.get(SCORING, 0.0),
        "buffer": load.waits.get(HANDING_OUT, 0.0),
    }
    largest = max(parts, key=lambda name: parts[name])
    match largest:
        case "rollout":
            awaited = _names(load.awaited) or "the rollout services"
            remedies = _for_rollout(load, config)
        case "reward":
            text = "add reward services or workers (reward.reward_replicas, reward.reward_workers), or shorten the reward's time limit"
            against = frozenset({AlarmKind.UNREAD, AlarmKind.DEAD, AlarmKind.RESTARTS, AlarmKind.MEMORY})
            awaited, remedies = "the reward services to score", [_Remedy(text, against)]
        case "its restarts":
            awaited, remedies = "its own restarts", [_Remedy("see why it dies: the Health page has its newest error", frozenset())]
        case "its checkpoints":
            awaited, remedies = "its own checkpoints", _for_saving(config)
        case "pushes of weights":
            now = config.weights.update_weights_interval
            text = f"push less often: weights.update_weights_interval (now {now}); tokens become older by it"
            awaited, remedies = "pushes of weights to end", [_Remedy(text, STALENESS | {AlarmKind.PUSH_GROWS})]
        case _:
            text = "look at the store and the buffer: a batch that is complete should begin within a second"
            against = frozenset({AlarmKind.HELD_BACK, AlarmKind.MEMORY, AlarmKind.AWAY})
            awaited, remedies = "its batch to be formed and read", [_Remedy(text, against)]
    share = parts[largest]
    rest = f", and {_percent(load.waiting - share)} for others" if load.waiting - share >= LITTLE else ""
    return Bottleneck(f"The trainer waits {_percent(share)} of the time for {awaited}{rest}.", (), "trainer", awaited, share), remedies


def _for_rollout(load: Workload, config: RunConfig) -> list[_Remedy]:
    """Returns what helps where generation is too slow: a synchronous run overlaps first, full replicas need company, others more groups."""
    bound, replicas = config.rollout.max_staleness, max(1, len(load.replicas))
    raise_bound = _Remedy(_raised(bound), STALENESS)
    if bound == 0:
        return [raise_bound]
    if load.slow:
        return [_Remedy(_held_back(name, times), frozenset()) for name, times in load.slow.items()]
    more = max(1, math.ceil(replicas / max(1 - load.waiting, 0.5)) - replicas)
    company = f"add replicas, {more} at first (rollout.rollout_replicas)"
    if load.queued >= QUEUED:
        full = [_Remedy(f"{company}: those that run are full, groups spend {_percent(load.queued)} of their way in the queue", REPLICAS)]
        lends = config.trainer.lend_gpus or config.trainer.train_device == "cpu" or any(config.lending_obstacles)
        return full if lends else [*full, _Remedy("or have the trainer's GPUs generate while it waits: trainer.lend_gpus", REPLICAS)]
    shorter = "let the slowest responses hold up no batch: rollout.surplus_rollouts for agents, or a smaller rollout_max_response_len"
    cut_off = frozenset({AlarmKind.TRUNCATION, AlarmKind.NOT_FINITE})
    remedies = [raise_bound, _Remedy(shorter, cut_off)]
    if load.idle >= IDLE:  # they lack groups, not company
        return remedies
    return [*remedies, _Remedy(f"{company}: each then has fewer groups, and is faster with them", REPLICAS)]


def _held_back(name: str, times: float) -> str:
    reasons = "its GPU may be shared or throttled, its machine busy, its network slow"
    return f"see what holds {name} back, or do without it: a group takes it {times:.1f} times as long as the other replicas; {reasons}"


def _raised(bound: int) -> str:
    if bound == 0:
        return "raise rollout.max_staleness to 1: with 0 no group begins before the step that it is for, and trainer and rollout take turns"
    return f"raise rollout.max_staleness (now {bound}): more groups are then under way, and one slow group holds up no step"


def _for_saving(config: RunConfig) -> list[_Remedy]:
    found = [_Remedy(f"save less often: trainer.save_interval (now {config.trainer.save_interval})", frozenset({AlarmKind.RESTARTS}))]
    if not config.trainer.async_save:
        text = "write checkpoints beside the training: trainer.async_save"
        found.insert(0, _Remedy(text, frozenset({AlarmKind.MEMORY, AlarmKind.DISK})))
    return found


# --- the trainer is busy


def _trainer_busy(load: Workload, config: RunConfig) -> tuple[Bottleneck, list[_Remedy]]:
    trains = f"The trainer trains {_percent(1 - load.waiting)} of the time"
    if load.idle < LITTLE or not load.replicas:
        return Bottleneck(f"{trains} and the replicas are busy beside it: no service waits for another."), []
    names = _names(sorted(load.replicas, key=lambda name: load.replicas[name]))
    verb = "waits" if len(load.replicas) == 1 else "wait"
    found = Bottleneck(f"{trains}; {names} {verb} {_percent(load.idle)} of it for the trainer.", (), names, "trainer", load.idle)
    remedies = [_Remedy("give the trainer more ranks (trainer.actor_num_gpus_per_node), or a batch less to compute", HARDWARE)]
    enough = math.ceil(len(load.replicas) * (1 - load.idle) / (1 - LITTLE))
    if enough < len(load.replicas):
        text = f"{enough} replica{'' if enough == 1 else 's'} would do: the others' GPUs could train (rollout.rollout_replicas)"
        remedies.append(_Remedy(text, HARDWARE | {AlarmKind.RESTARTS}))
    return found, remedies


def _losses(load: Workload, config: RunConfig) -> list[_Remedy]:
    """Returns what to do about generated tokens that are not trained."""
    if load.lost_tokens < LITTLE:
        return []
    lost, policy = f"{_percent(load.lost_tokens)} of the generated tokens are not trained", config.rollout.staleness_policy
    if policy == "drop":
        return [_Remedy(f"{lost}: rollout.staleness_policy = continue or mask keeps groups that drop gives up for their age", STALENESS)]
    return [_Remedy(f"{lost}: the tokens by length below show which; fewer replicas, or a larger bound, lose fewer by age", STALENESS)]


# --- words

# Alarms under which older tokens would make things worse
STALENESS = frozenset({AlarmKind.LOGPROBS, AlarmKind.ENTROPY, AlarmKind.NOT_FINITE})

# Alarms under which more replicas would make things worse, or only hide them
REPLICAS = frozenset({AlarmKind.PUSH_GROWS, AlarmKind.MEMORY, AlarmKind.RESTARTS, AlarmKind.NOT_FINITE, AlarmKind.HELD_BACK})

HARDWARE = frozenset({AlarmKind.NOT_FINITE, AlarmKind.SAME_REWARD, AlarmKind.NO_SIGNAL})  # Alarms under which training faster is no gain


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _names(names: Sequence[str]) -> str:
    """Returns names as a sentence has them; of many the first."""
    shown, more = list(names[:NAMES_SHOWN]), len(names) - NAMES_SHOWN
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


GENERATING = "generating"  # What a replica does while it is busy
OF_ROLLOUT = {ADMISSION, QUEUE, GENERATION}  # Causes of a wait for the rollout services


def causes_of(history: FlowHistory, step: StepRecord) -> list[tuple[str, Interval]]:
    """Returns the parts of the wait before a step, each with its cause; none where that wait is not known."""
    if step.wait_from is None or step.wait_from >= step.started:
        return []
    reported = history.metrics.get(step.step, {})
    saving, stall = (reported.get(f"perf/train_{what}_time", 0.0) for what in ("save", "push"))
    wait = (step.wait_from, step.started)
    return wait_causes(wait, step.last, saving, stall, history.back_at(wait))


def workload(history: FlowHistory, window: Interval, blocked: str = "") -> Workload:
    """Returns how the steps that ended within a window came about."""
    steps = [step for step in history.steps_in(window) if step.wait_from is not None]
    parts = [(step, cause, end - begin) for step in steps for cause, (begin, end) in causes_of(history, step)]
    for_rollout = [(step.last, spent) for step, cause, spent in parts if step.last is not None and cause in OF_ROLLOUT]
    since = min((step.wait_from or 0.0 for step in steps), default=window[0])
    return Workload(
        steps=len(steps),
        waits=_waits(history, window, steps, [(cause, spent) for _, cause, spent in parts]),
        awaited=(awaited := _most(sums((last.replica, spent) for last, spent in for_rollout))),
        replicas=_busy(history, (since, window[1])),
        queued=_queued(last for last, _ in for_rollout),
        slow=_slow(history, (since, window[1]), awaited),
        lost_tokens=_lost(history),
        blocked=blocked,
    )


def _waits(history: FlowHistory, window: Interval, steps: Sequence[StepRecord], parts: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Returns the causes' shares of the time of these steps. A push that a step itself stood still for counts as a wait."""
    stalls = [(PUSHING, push.stall) for push in history.pushes if window[0] <= push.at <= window[1] and push.stall > 0]
    total = sum(step.ended - (step.wait_from or 0.0) for step in steps)
    return {cause: min(1.0, spent / total) for cause, spent in sums([*parts, *stalls]).items()} if total > 0 else {}


def _queued(awaited: Iterable[GroupPassage]) -> float:
    """Returns the part of the way of these groups, as far as it is known from their admission on, before a replica took them."""
    ways = [(max(0.0, last.started - last.admitted), max(0.0, last.generated - last.admitted)) for last in awaited if last.admitted]
    whole = sum(way for _, way in ways)
    return sum(min(queue, way) for queue, way in ways) / whole if whole else 0.0


def sums(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Returns the sum of each name, the largest first."""
    found: defaultdict[str, float] = defaultdict(float)
    for name, value in parts:
        found[name] += value
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _most(waits: Mapping[str, float]) -> list[str]:
    """Returns the names that make up most of a wait, of a sum by name with the largest first."""
    found, spent, whole = [], 0.0, sum(waits.values())
    for name, wait in waits.items():
        if spent >= MOST_OF_WAIT * whole:
            break
        found.append(name)
        spent += wait
    return found


def _slow(history: FlowHistory, window: Interval, awaited: Collection[str]) -> dict[str, float]:
    """Returns the awaited replicas that take much longer for a group than the others do, and how many times as long."""
    spent = {
        replica: statistics.median(lengths)
        for replica, spans in history.generated.items()
        if (lengths := [end - begin for begin, end in spans if window[0] <= end <= window[1]])
    }
    others = [seconds for replica, seconds in spent.items() if replica not in awaited]
    usual = statistics.median(others) if others else 0.0
    return {name: spent[name] / usual for name in awaited if usual > 0 and spent.get(name, 0.0) >= SLOW * usual}


def _busy(history: FlowHistory, window: Interval) -> dict[str, float]:
    """Returns the share of a window in which each replica generated, of those that did."""
    length = max(window[1] - window[0], 1e-9)
    found = {}
    for replica in history.generated:
        spans = laid_over([generating(history, replica)], window)
        found[replica] = sum(span.end - span.begin for span in spans) / length
    return {replica: share for replica, share in found.items() if share}


def generating(history: FlowHistory, replica: str) -> list[ActivitySpan]:
    """Returns when a replica generated: by groups that came back, and by what it was seen to do."""
    seen = [(span.begin, span.end) for span in history.looks.get(replica, ()) if span.activity == GENERATING]
    return [ActivitySpan(GENERATING, *interval) for interval in union([*history.generated.get(replica, ()), *seen])]


def _lost(history: FlowHistory) -> float:
    """Returns the share of generated tokens that were not trained."""
    lost = sum(item.dropped + item.masked for item in history.lengths.values())
    whole = lost + sum(item.trained for item in history.lengths.values())
    return lost / whole if whole else 0.0
