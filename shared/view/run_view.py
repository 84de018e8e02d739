"""The state of a run at one moment, for the live panel, plain lines, `myxo status` and `myxo watch`, and the failures of its services.

It is made from the statuses that services publish and from the launcher's record of its processes. A service that is away or new leaves
gaps; every figure may be absent.
"""

import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shared.bus.registry import ENGINE_NODE, ENVIRONMENT, MODEL, NODE, STANDBY
from shared.config.run_config import RunConfig
from shared.process.child_process import cause
from shared.runtime.safe_text import number, shortened_line
from shared.schema.service_messages import ServiceEvent, ServiceStatus
from shared.view.live_services import InstanceStatus, count, newest_gauges, newest_status, present, shown, trained_steps, warm_start
from shared.view.stall import RunSituation, Stall, run_stall

QUEUES = ("task", "eval", "generated", "scored")

LATELY_SECONDS = 300.0  # The time for which the error of a service that is well again is shown


@dataclass(frozen=True)
class InstanceLine:
    """One service. ``version``: weights it serves (-1: none); ``restarts``: None where this process is not its launcher; ``http``: the
    ``host:port`` of its ``/healthz`` and ``/metrics``, empty where none is known."""

    service: str
    instance: str
    state: str
    version: int
    restarts: int | None
    detail: str
    http: str = ""


# The buffer's gauges ``eval_<figure>.<set>``, in the order of `EvaluationLine`'s fields
EVAL_FIGURES = ("reward", "version", "newest", "lag", "missing", "prompts")


@dataclass(frozen=True)
class EvaluationLine:
    """The newest evaluation of one held-out set. ``version``: the weights that it is of; ``newest``: that sampled its last tokens.

    ``lag``: by how many versions it was behind when it was known. ``missing``: of its ``prompts``, those that failed or were late.
    """

    mean_reward: float
    version: float
    newest: float = 0
    lag: float = 0
    missing: float = 0
    prompts: float = 0

    def __str__(self) -> str:
        """Returns the figure with all that it is of: ``0.412 (v20 to v21, 1 behind, 60 of 64 prompts)``."""
        newest = f" to v{number(self.newest)}" if self.newest > self.version else ""
        behind = f", {number(self.lag)} behind" if self.lag else ""
        missing = f", {number(self.prompts - self.missing)} of {number(self.prompts)} prompts" if self.missing else ""
        return f"{number(self.mean_reward, '.3f')} (v{number(self.version)}{newest}{behind}{missing})"


@dataclass(frozen=True)
class ServiceError:
    """The newest error of a service. ``restarts``: how often it was started again, 0 where that is not known."""

    instance: str
    restarts: int
    reason: str

    def __str__(self) -> str:
        restarts = f" restarts {self.restarts}" if self.restarts else ""
        return f"{shortened_line(self.instance)}{restarts}" + (f": {shortened_line(self.reason)}" if self.reason else "")


@dataclass(frozen=True)
class Troubles:
    """``dead``: groups since the run began; ``dead_reason``: the newest reason in this buffer's life. ``eval_failed``: held-out prompts.
    ``stopped``: why the run was given up, once it was.
    """

    dead: float = 0
    dead_per_minute: float = 0.0
    dead_reason: str = ""
    eval_failed: float = 0
    errors: tuple[ServiceError, ...] = ()
    disk: str = ""
    held_back: tuple[str, ...] = ()
    stopped: str = ""

    def lines(self) -> list[str]:
        """Returns one line for each trouble."""
        found = [f"stopped: {shortened_line(self.stopped)}"] if self.stopped else []
        if self.dead or self.eval_failed:
            failed = f" and {number(self.eval_failed)} held-out prompts" if self.eval_failed else ""
            reason = f": {shortened_line(self.dead_reason)}" if self.dead_reason else ""
            found.append(f"dead {number(self.dead)} groups{failed} ({number(self.dead_per_minute)}/min){reason}")
        return [*found, *self.held_back, *map(str, self.errors), *([self.disk] if self.disk else [])]


@dataclass(frozen=True)
class RunView:
    """A run at one moment. ``queues``: name → (waiting, in workers' hands). A figure that a service gives as nan or inf stays that.

    Rates are in tokens a second: ``generated_per_s`` over the last seconds, ``trained_per_s`` over the newest step and the wait before it,
    ``computed_per_s`` over that step's optimizer steps alone. ``evaluations``: by the held-out sets' names. ``waiting_for``: what the next
    step waits for, ``waiting_since`` then (seconds since the epoch, 0: not known); ``stalled``: that is out of the ordinary.
    """

    run: str
    steps: int
    of: int
    bound: int
    reward: float | None = None
    loss: float | None = None
    evaluations: dict[str, EvaluationLine] = field(default_factory=dict)
    staleness_mean: float | None = None
    staleness_max: float | None = None
    generated_per_s: float | None = None
    trained_per_s: float | None = None
    computed_per_s: float | None = None
    live_version: int = -1
    in_flight: float | None = None
    ready_groups: float | None = None
    queues: dict[str, tuple[float, float]] = field(default_factory=dict)
    services: tuple[InstanceLine, ...] = ()
    restarts: int = 0
    waiting_for: str | None = None
    waiting_since: float = 0.0
    stalled: bool = False
    troubles: Troubles = field(default_factory=Troubles)

    @classmethod
    def at_start(cls, config: RunConfig, steps: int) -> "RunView":
        """Returns the view of a run of which nothing is known but that ``steps`` are trained."""
        return cls(config.run.name, steps, config.rollout.num_rollout, config.rollout.max_staleness)

    def stopped(self, reason: str) -> "RunView":
        """Returns the view of the run that was given up for ``reason``, if there is one."""
        return replace(self, troubles=replace(self.troubles, stopped=reason))

    def finished(self, owed: bool = False) -> "RunView":
        """Returns the view of the finished run; what services report may be seconds behind. ``owed``: it still waits for its weights."""
        return replace(self, steps=self.of, waiting_for=self.waiting_for if owed else None, stalled=owed and self.stalled)

    @property
    def replicas_ready(self) -> tuple[int, int]:
        """Returns (serving, all) rollout replicas."""
        rollouts = [line for line in self.services if line.service == "rollout"]
        return sum(line.state == "ready" for line in rollouts), len(rollouts)


def run_view(
    config: RunConfig,
    services: Sequence[ServiceStatus],
    instances: Sequence[InstanceStatus] = (),
    servers: Sequence[ServiceError] = (),
    before: RunView | None = None,
    began: int = 0,
    disk: str = "",
    wait: Stall | None = None,
) -> RunView:
    """Returns the view made of these.

    Args:
        services: what the registry holds. instances, servers: the launcher's own processes and the restarts of its embedded servers; empty
            where this process is not the launcher. before: the view that this one follows; its figures stand in for those that no service
            reports. began: steps trained when the launch began: until there is one more every wait is worth a line. disk: what to say
            of a disk that is full. wait: what the run waits for, where the caller knows more than the statuses say.
    """
    now, wait = time.time(), wait or run_stall(RunSituation.of(config, services, instances, disk=disk))
    before, services = before or RunView.at_start(config, 0), [shown(status) for status in services]
    buffer, trainer = newest_gauges(services, "buffer"), newest_gauges(services, "trainer")
    served = [status.version for status in services if status.service == "trainer"]  # the version its last push made live
    rates = [status.gauges["generated_tokens_per_s"] for status in services if "generated_tokens_per_s" in status.gauges]
    steps = max(trained_steps(services), before.steps)
    return RunView(
        run=config.run.name,
        steps=steps,
        of=config.rollout.num_rollout,
        bound=config.rollout.max_staleness,
        reward=trainer.get("reward", before.reward),
        loss=trainer.get("loss", before.loss),
        evaluations={**before.evaluations, **_evaluations(buffer)},
        staleness_mean=trainer.get("staleness_mean", before.staleness_mean),
        staleness_max=trainer.get("staleness_max", before.staleness_max),
        generated_per_s=sum(rates) if rates else None,
        trained_per_s=trainer.get("train_tokens_per_s"),
        computed_per_s=trainer.get("train_compute_tokens_per_s"),
        live_version=max(count(buffer, "live_version", -1), *served, before.live_version),
        in_flight=buffer.get("in_flight"),
        ready_groups=buffer.get("ready"),
        queues={name: (buffer[f"queue_{name}"], buffer.get(f"queue_{name}_held", 0)) for name in QUEUES if f"queue_{name}" in buffer},
        services=_lines(services, instances),
        restarts=sum(instance.restarts for instance in instances) + sum(server.restarts for server in servers),
        waiting_for=wait.words(now),
        waiting_since=wait.since,
        stalled=steps <= began or wait.worth_a_line(now),
        troubles=troubles(services, instances, servers, before.troubles, disk),
    )


def _evaluations(buffer: dict[str, float]) -> dict[str, EvaluationLine]:
    """Reads the gauges ``eval_reward`` and so on of each set, in the names' order."""
    names = sorted(gauge.removeprefix("eval_reward.") for gauge in buffer if gauge.startswith("eval_reward."))
    return {name: EvaluationLine(*(buffer.get(f"eval_{figure}.{name}", 0) for figure in EVAL_FIGURES)) for name in names}


# --- services


def _lines(services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus]) -> tuple[InstanceLine, ...]:
    alive = {status.instance: status for status in present(services, instances) if status.service != ENVIRONMENT}
    own = {instance.instance for instance in instances}
    environments = sorted((status for status in services if status.service == ENVIRONMENT), key=lambda status: status.instance)
    return (
        *(_own_line(instance, alive.get(instance.instance)) for instance in instances),
        *(_line(alive[name], None) for name in sorted(alive.keys() - own)),
        *(InstanceLine(status.service, status.instance, status.state, -1, None, status.detail or status.http) for status in environments),
    )


def _own_line(instance: InstanceStatus, status: ServiceStatus | None) -> InstanceLine:
    """Returns the line of a process of this launcher."""
    if status is not None and instance.due_in is None:
        return _line(status, instance.restarts)
    state, detail = "running" if instance.foreign else "starting", ""
    if instance.due_in is not None:
        state, detail = "down", f"{cause(instance.last_code)}, again in {instance.due_in:.0f} s"
    return InstanceLine(instance.service, instance.instance, state, -1, instance.restarts, detail)


def _line(status: ServiceStatus, restarts: int | None) -> InstanceLine:
    return InstanceLine(status.service, status.instance, status.state, status.version, restarts, _detail(status), status.http)


def _detail(status: ServiceStatus) -> str:
    gauges = status.gauges
    match status.service:
        case kind if kind in (NODE, ENGINE_NODE, MODEL):
            return status.detail
        case "rollout" if status.state != "ready" and status.detail:  # other nodes of its engine are not there
            return status.detail
        case "rollout" if "running_groups" in gauges:
            rate = gauges.get("generated_tokens_per_s", 0.0)
            drafts = f", {gauges['accept_length']:.2f} a verification" if "accept_length" in gauges else ""
            samples = number(gauges.get("running_samples", 0))
            return f"{number(gauges['running_groups'])} groups, {samples} samples, {number(rate)} tokens/s{drafts}"
        case "reward" if "scoring" in gauges:
            return f"scoring {number(gauges['scoring'])} groups"
        case "buffer" if status.state == STANDBY:
            return f"{number(gauges.get('followed', 0))} records of the ledger followed"
        case "buffer" if "in_flight" in gauges:
            return f"{number(gauges['in_flight'])} groups in flight, {number(gauges.get('ready', 0))} ready"
        case "trainer":
            return warm_start([status]) or (f"{number(gauges['train_tokens_per_s'])} tokens/s" if "train_tokens_per_s" in gauges else "")
        case _:
            return ""


# --- troubles


def troubles(
    services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus], servers: Sequence[ServiceError], before: Troubles, disk: str
) -> Troubles:
    """Returns what goes wrong, as services and launcher report it. ``before`` stands in for a buffer that is away."""
    buffer = newest_status(services, "buffer")
    gauges, detail = (buffer.gauges, buffer.detail) if buffer is not None and buffer.state != "starting" else ({}, "")
    return Troubles(
        dead=gauges.get("dead", before.dead),
        dead_per_minute=gauges.get("dead_per_minute", before.dead_per_minute),
        dead_reason=detail or before.dead_reason,
        eval_failed=gauges.get("eval_failed", before.eval_failed),
        errors=(*_errors(services, instances), *(server for server in servers if server.restarts)),
        disk=disk,
        held_back=tuple(f"{status.instance} holds back: {status.held_back}" for status in services if status.held_back),
    )


def _errors(services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus]) -> tuple[ServiceError, ...]:
    """Returns the error of each service that was restarted lately, and of each other that has logged one lately."""
    restarted = {
        instance.instance: ServiceError(instance.instance, instance.restarts, instance.last_error)
        for instance in instances
        if instance.last_error and (instance.due_in is not None or instance.lived < LATELY_SECONDS)
    }
    logged = [
        ServiceError(status.instance, 0, status.last_error)
        for status in services
        if status.last_error and status.instance not in restarted and status.at - status.last_error_at < LATELY_SECONDS
    ]
    return (*restarted.values(), *logged)


FAILED, RESTARTED = "failed", "restarted"  # The events of a service that ends by an error, and of the launcher that started one again

# The launcher's events that the run continues after a wait: one that went wrong, or another long one; the detail has length and cause
WENT_ON, WAITED = "went_on", "waited"

MOST_WAITS = 20  # The newest waits that are kept
FULL_BYTES = 32 << 20  # A disk with less room than this counts as full


@dataclass
class ServiceFailures:
    """The restarts of each service, the last error of each service that failed or was restarted, and what the run has waited for."""

    restarts: Counter[str] = field(default_factory=Counter)
    errors: dict[str, str] = field(default_factory=dict)
    waits: list[str] = field(default_factory=list)

    def take(self, event: ServiceEvent) -> None:
        """Takes an event, in the order of the stream: the launcher's event that it started a service again comes after the service's own
        that it failed, and says more."""
        if event.what == RESTARTED:
            self.restarts[event.instance] += 1
        if event.what == WENT_ON:
            self.waits = [*self.waits, event.detail][-MOST_WAITS:]
        if event.what in (FAILED, RESTARTED) and event.detail:
            self.errors[event.instance] = event.detail


def with_failures(view: RunView, failures: ServiceFailures, restarts: int) -> RunView:
    """Returns the view with failures, and so many restarts in all: the status of a service that died is gone with it."""
    known = {error.instance: error for error in view.troubles.errors}
    for instance in failures.errors | failures.restarts:
        known[instance] = ServiceError(instance, failures.restarts[instance], failures.errors.get(instance, ""))
    return replace(view, restarts=restarts, troubles=replace(view.troubles, errors=tuple(known.values())))


def full_disk(root: Path) -> str:
    """Returns a line about the disk that ``root`` lies on where that is full, else nothing."""
    free = shutil.disk_usage(root).free
    return f"No space left on device: {free >> 20} MB are free at {root}" if free < FULL_BYTES else ""
