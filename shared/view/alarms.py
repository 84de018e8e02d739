"""The alarms of a run: what may be wrong although it continues, what it means, and what to do; and the page *Health*."""

import math
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from pathlib import Path

from shared.bus.registry import ENVIRONMENT
from shared.config.run_config import RunConfig
from shared.config.speculation import COSTS, SPECULATION_OFF, SPECULATION_ON
from shared.model.quantization import FORMATS, entry_format
from shared.runtime.errors import Fault
from shared.runtime.host import host_memory
from shared.runtime.safe_text import number, shortened_line
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.view.flow_history import DEAD, DROPPED, STALE, TRAINED, DeadGroup, FlowHistory, StepRecord
from shared.view.live_services import newest_gauges, shown


class AlarmKind(Enum):
    """What may be wrong with a run although it continues."""

    AWAY = "a server or service is away"
    RESTARTS = "services restart"
    HELD_BACK = "work is held back"
    NOT_FINITE = "the loss is not finite"
    LOGPROBS = "engine and trainer differ"
    ENTROPY = "entropy has collapsed"
    SAME_REWARD = "every reward is the same"
    NOT_RISEN = "the reward has not risen"
    NO_SIGNAL = "groups teach nothing"
    TRUNCATION = "responses are cut off"
    UNREAD = "rewards are not read"
    DEAD = "groups die"
    DROPPED = "groups are dropped for their age"
    PUSH_GROWS = "pushes take longer and longer"
    SPECULATION = "speculation costs more than it gives"
    DISK = "the disk fills"
    MEMORY = "memory runs out"


@dataclass(frozen=True)
class Room:
    """Free and all bytes of something."""

    free: int
    total: int

    @property
    def share(self) -> float:
        """Returns the share that is free."""
        return self.free / self.total if self.total else 1.0

    def __str__(self) -> str:
        return f"{self.free / 2**30:.1f} of {self.total / 2**30:.1f} GiB free"


def disk_room(directory: Path | None) -> Room | None:
    """Returns the room on the disk of a directory; None where this machine has no such directory."""
    try:
        usage = shutil.disk_usage(directory) if directory is not None else None
    except OSError:
        return None
    return Room(usage.free, usage.total) if usage is not None else None


LATELY_STEPS = 5  # The newest steps that an alarm judges
FIRST_STEPS = 10  # The first steps known, which later ones are compared with
ENTROPY_LEFT = 0.2  # Entropy has collapsed where less than this share of its first value is left, and less than `ENTROPY_LOW` nats a token
ENTROPY_LOW = 0.3

# Shares of groups with equal rewards, of responses that are cut off, of responses that the verifier cannot read, of groups dropped
EQUAL_SHARE, TRUNCATED_SHARE, UNREAD_SHARE, STALE_SHARE = 0.6, 0.3, 0.3, 0.25

# Pushes grow where the newest take this many times the first ones' seconds, and this many seconds more
PUSH_GROWTH, PUSH_SECONDS = 2.0, 0.5

SPECULATION_LENGTH = 1.1  # Tokens of a verification, which takes longer than a plain step: speculation gives less than them

# The fewest steps by which rewards and responses are judged; those of which the first and the last third are compared at a run's end
LEAST_STEPS, COMPARED_STEPS = 3, 9

DISK_SHARE, DISK_BYTES = 0.05, 5 << 30
MEMORY_SHARE = 0.08  # A disk is nearly full with less than this share and less than this many bytes free; memory with less than this share


@dataclass(frozen=True)
class Alarm:
    """``title``: the finding with its figures; ``meaning``: why that matters; ``remedy``: what to do. ``shown_by``: the command that shows
    it; empty: none does."""

    kind: AlarmKind
    title: str
    meaning: str
    remedy: str
    shown_by: str = ""

    def plain(self) -> dict[str, str]:
        """Returns it as JSON has it."""
        return {**asdict(self), "kind": self.kind.name.lower()}

    def lines(self) -> list[str]:
        """Returns the finding, what to do, and the command that shows it, for a terminal."""
        return [f"▲ {self.title}", f"  {self.remedy}", *([f"  → {self.shown_by}"] if self.shown_by else [])]


@dataclass(frozen=True)
class Symptoms:
    """What alarms are judged by.

    ``steps``: the newest ones, oldest first; ``metrics``: by step, under the names of docs/metrics.md; ``rewards``: of all steps, as far
    as they were measured; ``push_seconds``: of pushes that succeeded, in order; ``restarts``: lately, service → (times, newest reason);
    ``dead``: groups that died lately; ``stale_share``: of groups that ended lately, those dropped for their age; ``speculation_off``:
    replica → why it speculates no more; ``away``: server or service → why; ``finished``: the run is. Room: if known.
    """

    steps: Sequence[StepRecord] = ()
    metrics: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    rewards: Mapping[int, float] = field(default_factory=dict)
    push_seconds: Sequence[float] = ()
    statuses: Sequence[ServiceStatus] = ()
    restarts: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    dead: Sequence[DeadGroup] = ()
    stale_share: float = 0.0
    speculation_off: Mapping[str, str] = field(default_factory=dict)
    away: Mapping[str, str] = field(default_factory=dict)
    disk: Room | None = None
    memory: Room | None = None
    finished: bool = False


def alarms(found: Symptoms, config: RunConfig) -> list[Alarm]:
    """Returns the alarms that stand, in the order of `AlarmKind`."""
    raised = [
        *_services(found),
        *_numbers(found, config.monitoring.logprob_alarm, mismatch_remedy(config, _bisection(found, config))),
        *_rewards(found, config),
        *_batches(found.steps[-LATELY_STEPS:], found.metrics, config),
        *_ends(found, config),
        *_pushes(found.push_seconds),
        *_speculation(found),
        *_machine(found),
    ]
    kinds, order = {alarm.kind for alarm in raised}, list(AlarmKind)
    if AlarmKind.SAME_REWARD in kinds:  # which groups without a signal follow from
        raised = [alarm for alarm in raised if alarm.kind is not AlarmKind.NO_SIGNAL]
    return sorted(raised, key=lambda alarm: order.index(alarm.kind))


def _services(found: Symptoms) -> Iterator[Alarm]:
    for name, why in found.away.items():
        yield Alarm(
            AlarmKind.AWAY,
            f"{shortened_line(name)} is away: {shortened_line(why)}",
            "What it does stands still; nothing is lost, and the others wait for it within their deadlines.",
            "If it does not come back by itself, `myxo logs` shows how a service ended; a file needs room, or the permission to read it.",
        )
    for name, (times, reason) in found.restarts.items():
        yield Alarm(
            AlarmKind.RESTARTS,
            f"{shortened_line(name)} was restarted {times}×" + (f", {shortened_line(reason)}" if reason else ""),
            "Its work continues elsewhere or is done again. After three deaths of one error without a step the run is given up.",
            "`myxo logs` shows its last lines; one that was killed from outside (signal 9) mostly had no memory left.",
        )
    for status in found.statuses:
        if status.held_back:
            yield Alarm(
                AlarmKind.HELD_BACK,
                f"{shortened_line(status.instance)} holds work back: {shortened_line(status.held_back)}",
                "A stream or the store is full. Nothing is lost, but nothing new begins until there is room.",
                "A smaller trainer.save_interval frees payloads sooner; bus.max_ledger_bytes and store.max_bytes allow more.",
            )


# --- what the trainer measures


def _bisection(found: Symptoms, config: RunConfig) -> str:
    """Returns the command that finds where engine and trainer differ, for a sample of the newest step."""
    last = found.steps[-1].last if found.steps else None
    return config.bisect_command("GROUP/INDEX" if last is None else f"{last.group}/0")


def mismatch_remedy(config: RunConfig, bisection: str) -> str:
    """Returns what to do where engine and trainer differ, by the engines' precision. ``bisection``: the command that finds the cause."""
    form = FORMATS.get(config.rollout.rollout_precision) or entry_format(config.model.hf_checkpoint)
    cache = config.rollout.engine_flags.get("kv-cache-dtype", "auto")
    limited = "use_tis, which is on, limits the harm" if config.algorithm.correction == "decoupled" else "use_tis limits the harm"
    if form is not None and form.bits == 4 and not config.trainer.rounded_by:
        return f"engines sample by 4-bit weights: quantization_aware has the trainer compute with the same ones; {limited} meanwhile."
    if str(cache).startswith("fp8"):
        return f"engines keep keys and values as 8-bit floats: leave kv_cache_dtype = {cache} out; {limited} meanwhile."
    if form is not None and form.bits == 8:
        return f"engines sample by 8-bit weights, which the trainer does not round: {limited}; beyond it, serve the plain checkpoint."
    return f"`{bisection}` names the operation that differs, and a switch; {limited} meanwhile."


def _numbers(found: Symptoms, bound: float, remedy: str) -> Iterator[Alarm]:
    steps = sorted(found.metrics)
    lately = [found.metrics[step] for step in steps[-LATELY_STEPS:]]
    broken = sorted({name for values in lately for name in ("train/loss", "train/grad_norm") if not math.isfinite(values.get(name, 0.0))})
    if broken:
        yield Alarm(
            AlarmKind.NOT_FINITE,
            f"{' and '.join(broken)} of a step lately is nan or inf",
            "The optimizer skips such a step; where they continue, the trainer ends.",
            "Lower the learning rate or the clip range; the samples of its batch may show what was odd.",
        )
    difference = _difference(lately)
    if difference is not None and difference > bound:
        yield Alarm(
            AlarmKind.LOGPROBS,
            f"the log-probs of engine and trainer differ by {number(difference, '.3g')} nats a token (bound {bound:g})",
            "Under equal weights both should agree: importance weights and clipping then correct an error, not the policy's change.",
            remedy,
        )
    yield from _entropy([found.metrics[step] for step in steps])


def _difference(lately: Sequence[Mapping[str, float]]) -> float | None:
    """Returns the mean difference of log-probs over the tokens that engine and trainer computed under one version; nan and inf count."""
    tokens = sum(values.get("train/agreement_tokens", 0.0) for values in lately)
    total = sum(values.get("train/agreement_abs_diff", 0.0) for values in lately)
    if math.isnan(total):
        return math.inf
    return total / tokens if tokens > 0 else None


def _entropy(metrics: Sequence[Mapping[str, float]]) -> Iterator[Alarm]:
    name = "train/entropy_loss" if any("train/entropy_loss" in values for values in metrics) else "rollout/rollout_log_probs"
    known = [abs(values[name]) for values in metrics if math.isfinite(values.get(name, math.nan))]
    if len(known) < FIRST_STEPS + LATELY_STEPS:
        return
    first, last = statistics.median(known[:FIRST_STEPS]), statistics.median(known[-LATELY_STEPS:])
    if last < min(ENTROPY_LEFT * first, ENTROPY_LOW):
        what = "entropy" if name.endswith("entropy_loss") else "surprise (mean −log-prob of drawn tokens)"
        yield Alarm(
            AlarmKind.ENTROPY,
            f"{what} fell from {number(first, '.3g')} to {number(last, '.3g')} nats a token",
            "The policy draws nearly the same responses again and again: groups stop differing, and there is nothing left to learn from.",
            "Raise algorithm.entropy_coef or eps_clip_high, lower the learning rate, or go back to a checkpoint before the fall.",
        )


# --- what batches hold


def _rewards(found: Symptoms, config: RunConfig) -> Iterator[Alarm]:
    """A reward that teaches nothing over the whole run; where something else does instead, none is raised."""
    algorithm, same = config.algorithm, len({reward for step in found.steps for reward in (step.lowest, step.highest)}) == 1
    others = algorithm.turn_advantage_coef, algorithm.custom_advantage_function_path
    if any((algorithm.use_opd, algorithm.loss_type == "sft_loss", same and any(others))):
        return
    run, steps, own, kind = config.run.argument, found.steps, config.reward.custom_rm_path, config.reward.rm_type
    by = f"reward.custom_rm_path = {own}" if own else f"reward.rm_type = {kind or 'that of each prompt'}"
    if len(steps) >= LEAST_STEPS and same and math.isfinite(steps[0].lowest):
        yield Alarm(
            AlarmKind.SAME_REWARD,
            f"every reward of {len(steps)} steps is {number(steps[0].lowest, '.3g')}",
            "Nothing is learned from rewards that never differ, however long the run continues.",
            f"Compare responses and labels: forms may differ, or prompts are too hard. `myxo try CONFIG` calls {by}.",
            f"myxo samples {run} --status trained --responses",
        )
    elif found.finished and (words := _not_risen(found)):
        yield Alarm(
            AlarmKind.NOT_RISEN,
            f"the reward has not risen: {words}",
            "Unless it was high from the beginning, the policy is no better at its task than before.",
            "Read the best responses; then easier prompts, more samples a prompt, another learning rate, or more steps.",
            f"myxo samples {run} --status trained --sort reward --responses",
        )


def _not_risen(found: Symptoms) -> str:
    """Returns the figures of a reward that has not risen from the first step on; empty where it has, or where that is not known."""
    known = found.rewards if 0 in found.rewards else {step.step: step.reward for step in found.steps}
    rewards = [known[step] for step in sorted(known) if math.isfinite(known[step])]
    if len(rewards) < COMPARED_STEPS or 0 not in known:
        return ""
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    noise = 2 * math.sqrt((statistics.variance(first) + statistics.variance(last)) / third)
    before, after = statistics.fmean(first), statistics.fmean(last)
    words = f"{before:.3f} in the first third of the steps, {after:.3f} in the last (noise {noise:.3f})"
    return words if after - before <= noise else ""


def _batches(steps: Sequence[StepRecord], metrics: Mapping[int, Mapping[str, float]], config: RunConfig) -> Iterator[Alarm]:
    if len(steps) < LEAST_STEPS:
        return
    run, compares = config.run.argument, config.algorithm.needs_groups and not config.algorithm.turn_advantage_coef
    shown_by = f"myxo samples {run} --step {steps[-1].step}"
    groups, samples = sum(step.groups for step in steps), sum(step.samples for step in steps)
    name = "rollout/zero_std_groups"  # within a role, which the ledger does not tell
    shares = [metrics[step.step][name] for step in steps if name in metrics.get(step.step, {})]
    equal = statistics.fmean(shares) if shares else _share(sum(step.equal_rewards for step in steps), groups)
    if equal > EQUAL_SHARE and compares:
        yield Alarm(
            AlarmKind.NO_SIGNAL,
            f"{equal:.0%} of the last {groups} groups have equal rewards",
            "Their advantages are 0: they cost generation and teach nothing.",
            "Mix in prompts that are neither always nor never solved (a dynamic sampling filter, a curriculum), or more samples a prompt.",
            shown_by,
        )
    truncated = _share(sum(step.truncated for step in steps), samples)
    if truncated > TRUNCATED_SHARE:
        yield Alarm(
            AlarmKind.TRUNCATION,
            f"{truncated:.0%} of the last {samples} responses were cut off at their length",
            "A response without its end is mostly rewarded as wrong: the policy learns to be short, or nothing.",
            "Raise rollout.rollout_max_response_len, unless responses end in loops.",
            shown_by,
        )
    unread = _share(sum(step.unread for step in steps), samples)
    if unread > UNREAD_SHARE:
        yield Alarm(
            AlarmKind.UNREAD,
            f"the verifier could not read {unread:.0%} of the last {samples} responses",
            "They have reward 0 for their form, not for their answer.",
            "Each sample has its reason; the prompt may have to ask for the form that the verifier reads.",
            shown_by,
        )


def _ends(found: Symptoms, config: RunConfig) -> Iterator[Alarm]:
    if found.dead:
        last = found.dead[-1]
        yield Alarm(
            AlarmKind.DEAD,
            f"{len(found.dead)} groups died lately, the last for: {shortened_line(last.reason)}",
            "They can never be trained; others take their place. Many in a row end the run (rollout.max_dead_in_a_row).",
            "Correct what the reason names; `myxo try CONFIG` calls functions of yours on two prompts, in seconds.",
            f"myxo samples {config.run.argument} {last.group}",
        )
    if found.stale_share > STALE_SHARE:
        remedy = "staleness_policy = continue or mask"
        if config.rollout.staleness_policy == "mask":  # which drops what has no young token
            remedy = "generate functions that report the version of each token (append_response_tokens with meta_info), faster rewards"
        yield Alarm(
            AlarmKind.DROPPED,
            f"{found.stale_share:.0%} of the groups that ended lately were dropped for their age",
            "Long responses are dropped more often than short ones: what is trained is no fair sample of what was generated.",
            f"{remedy}, fewer replicas, or a larger max_staleness.",
        )


def _pushes(seconds: Sequence[float]) -> Iterator[Alarm]:
    if len(seconds) < FIRST_STEPS + LATELY_STEPS:
        return
    first, last = statistics.median(seconds[:FIRST_STEPS]), statistics.median(seconds[-LATELY_STEPS:])
    if last > PUSH_GROWTH * first and last - first > PUSH_SECONDS:
        yield Alarm(
            AlarmKind.PUSH_GROWS,
            f"a push of weights takes {number(last, '.2f')} s, at first it took {number(first, '.2f')} s",
            "Replicas pause for it, and the next step's tokens are older by it.",
            "The Weights page shows which replica and which part of the push; memory that a process loses over time is a common cause.",
        )


def _speculation(found: Symptoms) -> Iterator[Alarm]:
    known = [found.metrics[step].get("rollout/spec_accept_length", math.nan) for step in sorted(found.metrics)[-LATELY_STEPS:]]
    lengths = [length for length in known if math.isfinite(length)]
    titles = [f"{shortened_line(name)} has switched speculation off: {shortened_line(why)}" for name, why in found.speculation_off.items()]
    if len(lengths) >= LEAST_STEPS and (length := statistics.median(lengths)) < SPECULATION_LENGTH:
        titles.append(f"a verification of drafts brings {length:.2f} tokens, and takes longer than a plain step, which brings 1")
    for title in titles:
        yield Alarm(
            AlarmKind.SPECULATION,
            title,
            "Drafts are accepted too seldom, or too many requests run at once: samples are right, but come more slowly than without.",
            "Train the draft (trainer.enable_mtp_training), have fewer requests at once, or set rollout.speculation = off.",
        )


def _machine(found: Symptoms) -> Iterator[Alarm]:
    disk, memory = found.disk, found.memory
    if disk is not None and disk.share < DISK_SHARE and disk.free < DISK_BYTES:
        yield Alarm(
            AlarmKind.DISK,
            f"the disk of the run's directory has {disk}",
            "Streams, checkpoints and responses lie there; when it is full, the run waits for room.",
            "Remove old checkpoints or runs; trainer.keep_checkpoints and monitoring.keep_rollouts_bytes bound what this run keeps.",
        )
    if memory is not None and memory.share < MEMORY_SHARE:
        yield Alarm(
            AlarmKind.MEMORY,
            f"the console's machine has {memory} of memory and swap",
            "The kernel ends processes when there is none left; services then restart without a reason of their own.",
            "Fewer replicas, a smaller sglang_mem_fraction_static or micro-batch, or another machine for some services.",
        )


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


LATELY_S = 600.0  # Restarts, deaths and drops of this time raise alarms
EVENTS_SHOWN = 60


@dataclass(frozen=True)
class ServiceHealth:
    """A service that is there, or was restarted or failed since the run began. ``state``: empty where it is not there; ``error``: its
    newest, of this life or of the one before."""

    service: str
    instance: str
    state: str
    detail: str
    version: int
    restarts: int
    error: str
    held_back: str


@dataclass(frozen=True)
class DeadReason:
    """Groups that died for one reason. ``newest``: the last of them, which died at ``at`` (seconds since the epoch). ``fault``: what was at
    fault there, if it was told."""

    reason: str
    count: int
    newest: str
    at: float
    fault: Fault = ""


@dataclass(frozen=True)
class EventLine:
    """Something that a service told at ``at`` (seconds since the epoch)."""

    at: float
    instance: str
    what: str
    detail: str


@dataclass(frozen=True)
class HealthView:
    """The health. ``dead``: groups since the run began, None where it is not known; ``reasons``: of those that are remembered, the most
    frequent first. ``events``: what services told, the newest first. ``waiting_for``: what the next training step waits for."""

    alarms: list[Alarm]
    services: list[ServiceHealth]
    dead: int | None
    reasons: list[DeadReason]
    events: list[EventLine]
    disk: Room | None
    memory: Room | None
    waiting_for: str = ""


def symptoms(
    history: FlowHistory, statuses: Sequence[ServiceStatus], now: float, away: Mapping[str, str], disk: Room | None, memory: Room | None
) -> Symptoms:
    """Returns what alarms are judged by at ``now`` (seconds since the epoch)."""
    window = (now - LATELY_S, now)
    failed = history.failures_since(window[0])
    ended = sum(history.per_minute(end, window) for end in (DROPPED, TRAINED, DEAD))
    drafts = {event.instance: event for event in history.events if event.what in (SPECULATION_OFF, SPECULATION_ON)}
    costly = {name: one.detail for name, one in drafts.items() if one.what == SPECULATION_OFF and one.detail.startswith(COSTS)}
    return Symptoms(
        steps=list(history.steps),
        metrics=history.metrics,
        rewards=history.rewards,
        push_seconds=[push.seconds for push in history.pushes if not push.failure],
        statuses=[status for status in statuses if status.service != ENVIRONMENT],
        restarts={name: (times, failed.errors.get(name, "")) for name, times in failed.restarts.items()},
        dead=[group for group in history.dead if group.at >= window[0]],
        stale_share=history.per_minute(STALE, window) / ended if ended else 0.0,
        speculation_off=costly,
        away=away,
        disk=disk,
        memory=memory,
        finished=history.finished,
    )


def standing(
    history: FlowHistory, statuses: Sequence[ServiceStatus], away: Mapping[str, str], directory: Path | None, *, live: bool
) -> Symptoms:
    """Returns what alarms are judged by now, those of a run that is not ``live`` as they stood at its last record: without restarts, and
    without the room of whoever looks. ``directory``: the run's."""
    if not live:
        return replace(symptoms(history, statuses, history.newest, away, None, None), restarts={})
    total, free = host_memory()  # of this machine, or of the container around this process, with swap
    return symptoms(history, statuses, time.time(), away, disk_room(directory), Room(free, total))


def health_view(
    history: FlowHistory, config: RunConfig, statuses: Sequence[ServiceStatus], found: Symptoms, waiting_for: str = ""
) -> HealthView:
    """Returns the health, by these symptoms. ``waiting_for``: what the next training step waits for, in words."""
    statuses = [shown(status) for status in statuses]
    dead = newest_gauges(statuses, "buffer").get("dead")
    counts = Counter(group.reason for group in history.dead)
    newest = {group.reason: (group.group, group.at, group.fault) for group in history.dead}
    return HealthView(
        alarms=alarms(found, config),
        services=services_of(history, statuses),
        dead=int(dead) if dead is not None else None,
        reasons=[DeadReason(shortened_line(reason), count, *newest[reason]) for reason, count in counts.most_common()],
        events=[_line(event) for event in list(history.events)[: -EVENTS_SHOWN - 1 : -1]],
        disk=found.disk,
        memory=found.memory,
        waiting_for=waiting_for,
    )


def services_of(history: FlowHistory, statuses: Sequence[ServiceStatus]) -> list[ServiceHealth]:
    """Returns the services that are there, and those that failed or were restarted and are not."""
    failures, found = history.failures, []
    for status in sorted(statuses, key=lambda status: (status.service, status.instance)):
        error = status.last_error or failures.errors.get(status.instance, "")
        own = (status.state, status.detail, status.version, failures.restarts[status.instance], shortened_line(error), status.held_back)
        found.append(ServiceHealth(status.service, status.instance, *own))
    there = {status.instance for status in statuses}
    for instance in sorted((failures.errors.keys() | failures.restarts.keys()) - there):
        error = shortened_line(failures.errors.get(instance, ""))
        kind = next((event.service for event in reversed(history.events) if event.instance == instance), "")
        found.append(ServiceHealth(kind, shortened_line(instance), "", "", -1, failures.restarts[instance], error, ""))
    return found


def _line(event: ServiceEvent) -> EventLine:
    at = event.at if math.isfinite(event.at) else 0.0
    return EventLine(at, *(shortened_line(text) for text in (event.instance, event.what, event.detail)))
