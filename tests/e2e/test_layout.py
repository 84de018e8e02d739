"""A run with two trainer ranks that share the model, two replicas, several optimizer steps a batch, a KL term and the user's functions."""

import contextlib
import json
import operator
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from services.trainer.step_profiler import STEP_PARTS
from shared.schema.service_messages import ServiceStatus
from tests.e2e.launched import LaunchedRun, gauge
from tests.support.dashboards import alerts, metrics_asked_for, metrics_told, panels, scaled_object
from tests.support.prometheus_server import PROMETHEUS, SECONDS, PrometheusServer

RUN_SECONDS = 1200
FUNCTIONS = "examples.hooks.arithmetic"
GROUP = 4

MAY_BE_EMPTY = ('myxo_store_max_bytes{run="layout"} > 0',)
"""A query of the dashboard that has an answer only where the store has a bound."""


@pytest.mark.extra(each=True)
@pytest.mark.timeout(RUN_SECONDS + 300)
def test_two_ranks_two_replicas_and_the_users_functions(small_run: Callable[..., Path], tmp_path: Path) -> None:
    """Both replicas are pushed to; when one's process group breaks by its death, the other stays and the run ends well. Where there is a
    Prometheus, it watches the run as it does in the compose stack; that is left out where there is none.

    The functions are the example's, but for its dynamic filter: a random model is right too seldom for mixed groups.
    """
    steps = 8
    flags = [
        *("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--num-steps-per-rollout", "2"),
        *("--prefix-sharing", "on", "--rollout-replicas", "2", "--in-flight-on-push", "abort", "--kl-loss-coef", "0.01"),
        *("--custom-generate-function-path", f"{FUNCTIONS}:second_try", "--custom-rm-path", f"{FUNCTIONS}:score"),
        *("--rollout-sample-filter-path", f"{FUNCTIONS}:without_truncated"),
        *("--rollout-all-samples-process-path", f"{FUNCTIONS}:write_down"),
    ]
    config = small_run("layout", steps=steps, staleness=1)
    with LaunchedRun(config, tmp_path / "runs" / "layout", "layout", flags) as run, contextlib.ExitStack() as watching:
        services, since = run.until("all services", all_there, RUN_SECONDS), time.time()
        prometheus = watching.enter_context(PrometheusServer(tmp_path / "prometheus", services)) if PROMETHEUS else None
        cards = run.until("two replicas that serve", two_serve, RUN_SECONDS)
        assert {card.service for card in cards} == {"buffer", "reward", "rollout", "trainer"}
        told = set[str]().union(*(assert_watchable(card) for card in cards))
        assert metrics_asked_for() <= told, "dashboard, alerts or docs ask for what nobody tells"
        if prometheus is not None:
            assert_answered(prometheus, since)
        victim = next(card for card in cards if card.instance == "rollout-1")
        assert gauge(cards, "buffer", "trained_steps") < steps, "the run ended before a replica was killed: make it longer"
        run.kill(victim.pid)
        assert run.wait(RUN_SECONDS) == 0, run.said()
    summary = run.summary()
    assert summary["audit"] == "ok"
    assert summary["steps"] == steps
    difference = summary["mean_abs_logprob_diff"]
    assert isinstance(difference, float)
    assert difference < 1e-3
    root = tmp_path / "runs" / "layout"
    events = EventAccumulator(str(root / "tensorboard"))
    events.Reload()
    computed, tokens = ([event.value for event in events.Scalars(tag)] for tag in ("perf/actor_train_computed_tokens", "rollout/tokens"))
    assert len(tokens) == steps and all(map(operator.lt, computed, tokens)), "the samples of a group share their prompt"
    times = {part: [event.value for event in events.Scalars(f"perf/train_{part}_time")] for part in (*STEP_PARTS, "wait")}
    whole = [event.value + wait for event, wait in zip(events.Scalars("perf/step_time"), times.pop("wait"), strict=True)]
    assert [sum(parts) for parts in zip(*times.values(), strict=True)][1:] == pytest.approx(whole[1:], rel=0.02), "parts make up a step"
    assert min(times["gradient"]) > 0 and min(times["log_probs"]) > 0 and min(times["idle"][1:]) > 0 and max(times["push"]) > 0, times
    assert len(list((root / "hf").glob("model-*-of-00002.safetensors"))) == 2, "each rank writes its share"
    lines = [json.loads(line) for line in (root / "groups.jsonl").read_text().splitlines()]
    assert len(lines) >= steps * GROUP
    assert all(len(line["rewards"]) == GROUP and set(line["rewards"]) <= {1.0, 0.9, 0.0, -0.1} for line in lines)
    assert any(-0.1 in line["rewards"] for line in lines), "nobody tried twice"


def assert_answered(prometheus: PrometheusServer, since: float) -> None:
    """The real Prometheus scrapes every service and evaluates every rule; each panel of the dashboard has data."""
    prometheus.until_scraped()
    asked = [target["expr"].replace("$run", "layout") for panel in panels() for target in panel["targets"]]
    asked.append(scaled_object()["spec"]["triggers"][0]["metadata"]["query"].replace("quickstart", "layout"))
    end = time.monotonic() + SECONDS
    while without := [query for query in asked if query not in MAY_BE_EMPTY and not prometheus.evaluated(query, since)]:
        assert time.monotonic() < end, f"no data for {without}"
        time.sleep(1)
    rules = prometheus.rules()
    assert rules.keys() == alerts().keys()
    while any(rule["health"] == "unknown" for rule in rules.values()) and time.monotonic() < end:
        time.sleep(1)
        rules = prometheus.rules()
    assert {name: (rule["health"], rule.get("lastError")) for name, rule in rules.items()} == dict.fromkeys(alerts(), ("ok", None))
    for rule in alerts().values():
        prometheus.evaluated(rule["expr"], since)
    assert not prometheus.evaluated('ALERTS{alertname="MyxoNotFinite", alertstate="firing"}', since)


def all_there(cards: list[ServiceStatus]) -> bool:
    """Each answers at an address of its own."""
    kinds = sorted(card.service for card in cards if card.http)
    return kinds == ["buffer", "reward", "rollout", "rollout", "trainer"]


def assert_watchable(card: ServiceStatus) -> set[str]:
    """Every service answers health checks and shows Prometheus metrics. Returns their names."""
    with urllib.request.urlopen(f"http://{card.http}/healthz", timeout=30) as answer:
        health = json.load(answer)
    assert health["ok"] is True
    assert (health["service"], health["instance"], health["run"]) == (card.service, card.instance, "layout")
    with urllib.request.urlopen(f"http://{card.http}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    assert all(line.startswith(("#", "myxo_")) for line in text.splitlines())
    return metrics_told(text)


def two_serve(cards: list[ServiceStatus]) -> bool:
    """Each has taken two versions: some figures are of the time between two steps."""
    return sum(card.service == "rollout" and card.version >= 2 for card in cards) == 2
