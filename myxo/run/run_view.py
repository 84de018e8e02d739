"""What there is to see of a run at one moment, from the services' cards and the launcher's own knowledge. Pure.

A service that is away or new leaves gaps; every figure may be absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from myxo.display.durations import duration
from myxo.launch.supervisor import InstanceStatus
from myxo.run import troubles
from myxo.run.troubles import Troubles
from shared.bus.registry import ENVIRONMENT, STANDBY
from shared.config.run_config import RunConfig
from shared.runtime.child_process import cause
from shared.schema.messages import ServiceStatus

QUEUES = ("task", "eval", "generated", "scored")


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


@dataclass(frozen=True)
class EvaluationLine:
    """The newest evaluation of one held-out set. ``version``: the weights that it was made with."""

    mean_reward: float
    version: int


@dataclass(frozen=True)
class View:
    """See the module's docstring. ``queues``: name → (waiting, in workers' hands).

    Rates are in tokens a second: ``generated_per_s`` over the last seconds, ``trained_per_s`` over the newest step and the wait before it,
    ``computed_per_s`` over that step's optimizer steps alone. ``evaluations``: by the held-out sets' names.
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
    in_flight: int | None = None
    ready_groups: int | None = None
    queues: dict[str, tuple[int, int]] = field(default_factory=dict)
    services: tuple[InstanceLine, ...] = ()
    restarts: int = 0
    waiting_for: str | None = None
    troubles: Troubles = field(default_factory=Troubles)

    @property
    def replicas_ready(self) -> tuple[int, int]:
        """(serving, all) rollout replicas."""
        rollouts = [line for line in self.services if line.service == "rollout"]
        return sum(line.state == "ready" for line in rollouts), len(rollouts)


def look(
    config: RunConfig,
    cards: Sequence[ServiceStatus],
    statuses: Sequence[InstanceStatus] = (),
    server_restarts: Iterable[int] = (),
    before: View | None = None,
    began: int = 0,
) -> View:
    """Puts a view together.

    Args:
        before: the previous one, whose figures stand in for those of services that are away just now.
        began: steps that were trained when this launch began; until there is one more the view says what it waits for.
    """
    buffer, trainer = _newest(cards, "buffer"), _newest(cards, "trainer")
    served = [card.version for card in cards if card.service == "trainer"]  # the version its last push made live
    rates = [card.gauges["generated_tokens_per_s"] for card in cards if "generated_tokens_per_s" in card.gauges]
    steps = max(buffer.get("trained_steps", 0), trainer.get("step", 0), before.steps if before else 0)
    return View(
        run=config.run.name,
        steps=int(steps),
        of=config.rollout.num_rollout,
        bound=config.rollout.max_staleness,
        reward=trainer.get("reward", before.reward if before else None),
        loss=trainer.get("loss", before.loss if before else None),
        evaluations={**(before.evaluations if before else {}), **_evaluations(buffer)},
        staleness_mean=trainer.get("staleness_mean", before.staleness_mean if before else None),
        staleness_max=trainer.get("staleness_max", before.staleness_max if before else None),
        generated_per_s=sum(rates) if rates else None,
        trained_per_s=trainer.get("train_tokens_per_s"),
        computed_per_s=trainer.get("train_compute_tokens_per_s"),
        live_version=max(int(buffer.get("live_version", -1)), *served, before.live_version if before else -1),
        in_flight=_whole(buffer.get("in_flight")),
        ready_groups=_whole(buffer.get("ready")),
        queues={name: _depth(buffer, name) for name in QUEUES if f"queue_{name}" in buffer},
        services=_lines(cards, statuses),
        restarts=sum(status.restarts for status in statuses) + sum(server_restarts),
        waiting_for=waiting_for(config, cards, statuses) if steps <= began else None,
        troubles=troubles.look(cards, statuses, before.troubles if before else None),
    )


def waiting_for(config: RunConfig, cards: Sequence[ServiceStatus], statuses: Sequence[InstanceStatus]) -> str:
    """What the next training step waits for, in words."""
    for status in statuses:
        if status.due_in is not None:
            return f"{status.instance}, which ended with {cause(status.last_code)} and starts again in {status.due_in:.0f} s"
    away = [card for card in cards if card.service == ENVIRONMENT and card.state in ("away", "refused")]
    cards = [card for card in present(cards, statuses) if card.service != ENVIRONMENT]
    instances = {card.instance for card in cards}
    absent = [status for status in statuses if status.instance not in instances]
    warm_up = _sft(cards)
    engines = [card for card in cards if card.service == "rollout" and card.state == "starting"]
    if absent:
        oldest = max(absent, key=lambda status: status.lived)
        return f"{', '.join(status.instance for status in absent)} to start ({oldest.lived:.0f} s so far)"
    kinds = {card.service for card in cards if card.state != STANDBY}
    needed = ("buffer", "reward", "rollout", "trainer", *(("critic",) if config.algorithm.has_critic else ()))
    missing = [service for service in needed if service not in kinds]
    if missing:
        return f"a {missing[0]} service"
    parts = [f"engine of {', '.join(card.instance for card in engines)} starting"] if engines else []
    trainers = [card for card in cards if card.service in ("trainer", "critic") and card.state != "ready"]
    parts += [warm_up] if warm_up else [f"{card.instance} {card.state}" for card in trainers]
    if parts:
        return "; ".join(parts)
    buffer = _newest(cards, "buffer")
    if buffer.get("live_version", -1) < 0 or not any(card.service == "rollout" and card.version >= 0 for card in cards):
        states = ", ".join(f"{card.instance} {card.state}" for card in cards if card.service in ("trainer", "rollout"))
        return f"weights to be served ({states})"
    if away:
        return "; ".join(f"environment {card.instance} ({card.state}: {card.detail})" for card in away)
    if buffer.get("eval_pending"):
        return f"the evaluation of version {buffer['live_version']:.0f} ({buffer['eval_pending']:.0f} prompts outstanding)"
    if buffer.get("ready", config.rollout.rollout_batch_size) < config.rollout.rollout_batch_size:
        return f"a batch ({buffer['ready']:.0f} of {config.rollout.rollout_batch_size} groups ready)"
    return "a training step"


def present(cards: Sequence[ServiceStatus], statuses: Sequence[InstanceStatus]) -> list[ServiceStatus]:
    """The cards without those that the dead left behind: a card outlives its service by its TTL."""
    started = {status.instance: status.started_at for status in statuses if status.due_in is None}
    down = {status.instance for status in statuses if status.due_in is not None}
    return [
        card for card in cards if card.service == ENVIRONMENT or (card.instance not in down and card.at > started.get(card.instance, 0.0))
    ]


def _sft(cards: Sequence[ServiceStatus]) -> str | None:
    trainer = _newest(cards, "trainer")
    done, total = trainer.get("sft_step"), trainer.get("sft_steps")
    if not total or (done or 0) >= total:
        return None
    parts = [f"SFT step {done or 0:.0f}/{total:.0f}"]
    if "sft_loss" in trainer:
        parts.append(f"loss {trainer['sft_loss']:.3f}")
    if "sft_seconds_left" in trainer:
        parts.append(f"about {duration(trainer['sft_seconds_left'])} left")
    return ", ".join(parts)


def _evaluations(buffer: dict[str, float]) -> dict[str, EvaluationLine]:
    """From the gauges ``eval_<name>`` and ``eval_<name>_version``, in the names' order."""
    names = sorted(gauge.removeprefix("eval_") for gauge in buffer if gauge.startswith("eval_") and f"{gauge}_version" in buffer)
    return {name: EvaluationLine(buffer[f"eval_{name}"], int(buffer[f"eval_{name}_version"])) for name in names}


def _lines(cards: Sequence[ServiceStatus], statuses: Sequence[InstanceStatus]) -> tuple[InstanceLine, ...]:
    by_instance = {card.instance: card for card in present(cards, statuses) if card.service != ENVIRONMENT}
    environments = sorted((card for card in cards if card.service == ENVIRONMENT), key=lambda card: card.instance)
    own = {status.instance: status for status in statuses}
    lines = []
    for instance in [*own, *sorted(by_instance.keys() - own.keys())]:
        card, status = by_instance.get(instance), own.get(instance)
        state = card.state if card else "starting"
        detail = _detail(card) if card else ""
        if status is not None and status.due_in is not None:
            state, detail = "down", f"{cause(status.last_code)}, again in {status.due_in:.0f} s"
        service = status.service if status else by_instance[instance].service
        restarts, http = status.restarts if status else None, card.http if card else ""
        lines.append(InstanceLine(service, instance, state, card.version if card else -1, restarts, detail, http))
    return (*lines, *(InstanceLine(card.service, card.instance, card.state, -1, None, card.detail or card.http) for card in environments))


def _detail(card: ServiceStatus) -> str:
    gauges = card.gauges
    match card.service:
        case "rollout" if "running_groups" in gauges:
            rate = gauges.get("generated_tokens_per_s", 0.0)
            return f"{gauges['running_groups']:.0f} groups, {gauges.get('running_samples', 0):.0f} samples, {rate:.0f} tokens/s"
        case "reward" if "scoring" in gauges:
            return f"scoring {gauges['scoring']:.0f} groups"
        case "buffer" if card.state == STANDBY:
            return f"{gauges.get('followed', 0):.0f} records of the ledger followed"
        case "buffer" if "in_flight" in gauges:
            return f"{gauges['in_flight']:.0f} groups in flight, {gauges.get('ready', 0):.0f} ready"
        case "trainer":
            return _sft([card]) or (f"{gauges['train_tokens_per_s']:.0f} tokens/s" if "train_tokens_per_s" in gauges else "")
        case _:
            return ""


def _depth(buffer: dict[str, float], name: str) -> tuple[int, int]:
    return int(buffer[f"queue_{name}"]), int(buffer.get(f"queue_{name}_held", 0))


def _newest(cards: Sequence[ServiceStatus], service: str) -> dict[str, float]:
    """The gauges of the one that spoke last: of these services only one is at work. One that starts up has nothing to say yet."""
    working = (card for card in cards if card.service == service and card.state != STANDBY)
    newest = max(working, key=lambda card: (card.state != "starting", card.at), default=None)
    return newest.gauges if newest else {}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
