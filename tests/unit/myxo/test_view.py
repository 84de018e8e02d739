"""What there is to see of a run, from cards that may be absent, old, or incomplete."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from myxo.launch.service_plan import plan
from shared.config.run_config import RunConfig
from shared.schema.service_messages import ServiceStatus
from shared.view.live_services import InstanceStatus
from shared.view.run_view import EvaluationLine, run_view
from shared.view.stall import RunSituation, run_stall
from tests.support.run_config import run_config
from tests.support.valid_messages import example

NOW = time.time()


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return run_config(tmp_path)


def service(kind: str, state: str = "ready", *, number: int = 0, at: float = NOW, version: int = -1, **gauges: float) -> ServiceStatus:
    return example(ServiceStatus, service=kind, instance=f"{kind}-{number}", state=state, version=version, gauges=gauges, at=at)


def status(
    service: str, *, number: int = 0, due_in: float | None = None, restarts: int = 0, started_at: float = NOW - 50
) -> InstanceStatus:
    code = None if due_in is None else -9
    return InstanceStatus(service, f"{service}-{number}", 1, restarts, True, 50.0, started_at, due_in, code)


def evaluated(dataset: str, mean: float, version: int) -> dict[str, float]:
    """The gauges of an evaluation that all prompts came back for, under the live version."""
    figures = {"reward": mean, "version": version, "newest": version, "lag": 0, "missing": 0, "prompts": 8}
    return {f"eval_{name}.{dataset}": value for name, value in figures.items()}


def waiting_for(config: RunConfig, services: Sequence[ServiceStatus], instances: Sequence[InstanceStatus]) -> str:
    return run_stall(RunSituation.of(config, services, instances)).awaited


EVERYBODY = [service("buffer"), service("reward"), service("rollout", version=0), service("trainer")]


def test_nothing_is_known_at_first(config: RunConfig) -> None:
    view = run_view(config, [])
    assert (view.steps, view.of, view.live_version) == (0, 4, -1)
    assert view.reward is view.generated_per_s is view.in_flight is None
    assert view.queues == view.evaluations == {}
    assert view.waiting_for == "a buffer service"


def test_everything_is_taken_from_the_cards(config: RunConfig) -> None:
    buffer = service(
        "buffer",
        trained_steps=2,
        live_version=1,
        in_flight=6,
        ready=1,
        **evaluated("heldout", 0.25, 0),
        queue_task=3,
        queue_task_held=4,
        queue_scored=0,
    )
    speeds = {"train_tokens_per_s": 100, "train_compute_tokens_per_s": 150}
    trainer = service("trainer", step=2, reward=0.5, loss=-0.1, staleness_mean=0.75, staleness_max=1, **speeds)
    rollouts = [service("rollout", number=n, version=1, generated_tokens_per_s=50, running_groups=2, running_samples=8) for n in range(2)]
    view = run_view(config, [buffer, trainer, *rollouts])
    assert (view.steps, view.reward, view.loss) == (2, 0.5, -0.1)
    assert view.evaluations == {"heldout": EvaluationLine(0.25, 0, 0, 0, 0, 8)}
    assert (view.staleness_mean, view.staleness_max, view.live_version) == (0.75, 1, 1)
    assert (view.generated_per_s, view.trained_per_s, view.computed_per_s) == (100, 100, 150)
    assert (view.in_flight, view.ready_groups) == (6, 1)
    assert view.queues == {"task": (3, 4), "scored": (0, 0)}
    assert view.replicas_ready == (2, 2)
    assert (view.waiting_for, view.stalled) == ("a reward service", False)


def test_figures_survive_a_restart_of_the_service_they_came_from(config: RunConfig) -> None:
    before = run_view(config, [service("buffer", trained_steps=3, live_version=2), service("trainer", reward=0.5)])
    after = run_view(config, [service("rollout", version=2)], [status("buffer", due_in=2.0, restarts=1)], before=before)
    assert (after.steps, after.reward, after.live_version, after.restarts) == (3, 0.5, 2, 1)


def test_held_out_sets_are_known_by_their_names(config: RunConfig) -> None:
    """Whatever they are called; the newest figures of each stay when the buffer is away."""
    gauges = {**evaluated("live", 0.5, 2), **evaluated("gsm8k", -1.5, 4), "eval_pending": 3, "live_version": 9}
    view = run_view(config, [service("buffer", **gauges)])
    assert view.evaluations == {"gsm8k": EvaluationLine(-1.5, 4, 4, 0, 0, 8), "live": EvaluationLine(0.5, 2, 2, 0, 0, 8)}
    later = run_view(config, [service("buffer", **evaluated("live", 0.75, 6))], before=view)
    assert later.evaluations == {"gsm8k": EvaluationLine(-1.5, 4, 4, 0, 0, 8), "live": EvaluationLine(0.75, 6, 6, 0, 0, 8)}


def test_a_long_name_of_a_held_out_set_has_its_figures(config: RunConfig) -> None:
    name = "n" * 64
    assert run_view(config, [service("buffer", **evaluated(name, 0.5, 2))]).evaluations == {name: EvaluationLine(0.5, 2, 2, 0, 0, 8)}


def test_the_warm_start_tells_its_loss_and_the_time_left(config: RunConfig) -> None:
    gauges = {"sft_step": 10, "sft_steps": 500, "sft_loss": 2.31449, "sft_seconds_left": 83}
    view = run_view(config, [*EVERYBODY[:3], service("trainer", "warm start", **gauges)])
    assert view.waiting_for == "SFT step 10/500, loss 2.314, about 1m23s left"
    assert next(line.detail for line in view.services if line.service == "trainer") == view.waiting_for


def test_steps_never_fall(config: RunConfig) -> None:
    """A trainer that resumed from a checkpoint makes steps again that the buffer has counted."""
    before = run_view(config, [service("buffer", trained_steps=3)])
    assert run_view(config, [service("trainer", step=2)], before=before).steps == 3


def test_the_card_of_a_dead_life_is_not_shown_as_its_successors(config: RunConfig) -> None:
    services = [service("rollout", at=NOW - 5, version=7)]
    lines = run_view(config, services, [status("rollout", started_at=NOW - 1, restarts=1)]).services
    assert [(line.instance, line.state, line.version, line.restarts) for line in lines] == [("rollout-0", "starting", -1, 1)]


def test_who_is_down_says_when_it_comes_back(config: RunConfig) -> None:
    (line,) = run_view(config, [service("rollout")], [status("rollout", due_in=4.0)]).services
    assert (line.state, line.detail) == ("down", "signal 9, again in 4 s")


def test_the_figures_are_those_of_the_active_buffer(config: RunConfig) -> None:
    active = service("buffer", number=0, in_flight=4, live_version=1)
    waits = service("buffer", "standby", number=1, at=NOW + 5, followed=12)
    view = run_view(config, [active, waits, *EVERYBODY[1:]])
    assert (view.in_flight, view.live_version) == (4, 1)
    assert [(line.instance, line.state, line.detail) for line in view.services if line.service == "buffer"] == [
        ("buffer-0", "ready", "4 groups in flight, 0 ready"),
        ("buffer-1", "standby", "12 records of the ledger followed"),
    ]
    starts = service("buffer", "starting", number=2, at=NOW + 9)
    assert run_view(config, [active, waits, starts, *EVERYBODY[1:]]).in_flight == 4, "it has nothing to say yet"
    successor = service("buffer", number=1, at=NOW + 9, in_flight=2)
    assert run_view(config, [active, successor, *EVERYBODY[1:]]).in_flight == 2, "the card of the dead is older"


def test_a_buffer_on_standby_alone_is_not_enough(config: RunConfig) -> None:
    services = [service("buffer", "standby"), *EVERYBODY[1:]]
    assert waiting_for(config, services, []) == "a buffer service"
    assert run_view(config, services).in_flight is None


def test_services_that_joined_from_elsewhere_are_shown(config: RunConfig) -> None:
    lines = run_view(config, [service("rollout"), service("rollout", number=7)], [status("rollout")]).services
    assert [(line.instance, line.restarts) for line in lines] == [("rollout-0", 0), ("rollout-7", None)]


@pytest.mark.parametrize("generates_alone", [False, True])
def test_a_critic_is_waited_for_where_one_starts(tmp_path: Path, *, generates_alone: bool) -> None:
    run = run_config(tmp_path, algorithm={"advantage_estimator": "ppo"}, debug={"debug_rollout_only": generates_alone})
    started = {spec.service for spec in plan(run, "nats://host")}
    assert ("critic" in started) != generates_alone
    assert ("a critic service" in waiting_for(run, EVERYBODY, [])) != generates_alone


def test_every_wait_is_worth_a_line_until_there_is_one_more_step(config: RunConfig) -> None:
    before, after = (run_view(config, [service("buffer", trained_steps=steps)], began=2) for steps in (2, 3))
    assert before.waiting_for == after.waiting_for == "a reward service"
    assert before.stalled and not after.stalled


def environment(name: str, state: str = "ready", detail: str = "") -> ServiceStatus:
    fields = {"service": "environment", "instance": name, "http": "http://judge:8080", "state": state, "detail": detail, "at": NOW - 90}
    return example(ServiceStatus, **fields)


def test_environments_stand_after_the_services_whatever_they_are_called(config: RunConfig) -> None:
    services = [environment("buffer-0"), *EVERYBODY, environment("judge", "away", "Connection refused")]
    lines = run_view(config, services, [status("buffer", due_in=4.0), status("trainer")]).services
    assert [(line.service, line.instance, line.state) for line in lines[-2:]] == [
        ("environment", "buffer-0", "ready"),
        ("environment", "judge", "away"),
    ]
    assert [line.detail for line in lines[-2:]] == ["http://judge:8080", "Connection refused"]
    assert next((line.service, line.state) for line in lines if line.instance == "buffer-0") == ("buffer", "down")


def node(kind: str, instance: str, state: str, detail: str) -> ServiceStatus:
    return service(kind, state).model_copy(update={"instance": instance, "detail": detail})


def test_nodes_stand_with_what_they_wait_for(config: RunConfig) -> None:
    """A trainer's and an engine's; the first of a trainer's nodes tells which is missing."""
    missing, engines = "for node 1 (not there), of 2 nodes", "waiting for node 1 (a) (lost), of 2 nodes"
    waiting = [node("node", "trainer-node-0", "waiting", missing), node("node", "trainer-node-2", "waiting", "node 2 of 3, for node 0 (b)")]
    leader = node("rollout", "rollout-0", "starting", engines).model_copy(update={"gauges": {"running_groups": 0.0}})
    follower = node("engine-node", "rollout-0-node-1", "ready", "node 1 of 2, attempt 3")
    view = run_view(config, [*EVERYBODY[:2], leader, follower, *waiting])
    shown = {line.instance: (line.state, line.detail) for line in view.services}
    assert shown["trainer-node-0"] == ("waiting", missing)
    assert shown["rollout-0-node-1"] == ("ready", "node 1 of 2, attempt 3")
    assert shown["rollout-0"] == ("starting", engines)
    assert view.waiting_for == f"trainer-node-0, waiting {missing}"
    assert waiting_for(config, [*EVERYBODY[:2], EVERYBODY[3], leader], []) == f"engine of rollout-0 ({engines}) starting"
    assert run_view(config, waiting[1:]).waiting_for == "trainer-node-2, waiting node 2 of 3, for node 0 (b)"
