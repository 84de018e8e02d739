"""The alert rules fire when they should, by Prometheus' own promtool; dashboard, compose and docs fit them.

That every metric which they name is told by running services is asserted in tests/e2e/test_layout.py.
"""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.dashboards import ALERTS, DOCS, MONITORING, alerts, metrics_asked_for, panels, queries, scaled_object

UP = ["buffer", "reward", "rollout"]
HOURS = "x360"
"""A series of six hours, in minutes."""


@pytest.fixture(scope="module")
def promtool() -> str:
    return shutil.which("promtool") or pytest.skip("no promtool here: apt-get install prometheus")


def series(**values: str) -> dict[str, str]:
    """Series of metrics by the metric's name, with the labels of a run; ``up_SERVICE``: that a service is scraped."""
    healthy = {f"up_{service}": "1+0" + HOURS for service in UP}
    found = {}
    for name, points in (healthy | values).items():
        if name.startswith("up_"):
            found[f'up{{job="myxo", service="{name[3:]}"}}'] = points
        else:
            metric, _, labels = name.partition("__")
            found[f'myxo_{metric}{{run="r", instance="i", job="myxo"{", " + labels if labels else ""}}}'] = points
    return found


STEADY = {"trained_steps": "0+1" + HOURS, "in_flight": "8+0" + HOURS, "dead": "0+0" + HOURS, "admitted": "0+8" + HOURS}
GENERATED = '__queue="generated", consumer="math"'

FIRE: dict[str, dict[str, str]] = {
    "MyxoServiceMissing": {"up_rollout": "_" + HOURS},
    "MyxoNoStep": {"trained_steps": "3+0" + HOURS, "in_flight": "8+0" + HOURS},
    "MyxoReplicaIdle": {"generated_tokens_per_s": "0+0" + HOURS, "queue_task": "5+0" + HOURS},
    "MyxoScoringBehind": {f"queue_lag{GENERATED}": "65+0" + HOURS},
    "MyxoStoreNearlyFull": {"store_bytes": "86+0" + HOURS, "store_max_bytes": "100+0" + HOURS},
    "MyxoGroupsDie": {"dead": "0+2" + HOURS, "admitted": "0+8" + HOURS},
    "MyxoNotFinite": {"train_loss": " ".join(["NaN"] * 361)},
    "MyxoLogProbsDiffer": {"train_agreement_abs_diff": "20+0" + HOURS, "train_agreement_tokens": "100+0" + HOURS},
    "MyxoEntropyCollapse": {"rollout_rollout_log_probs": "-0.01+0" + HOURS},
    "MyxoGroupsTeachNothing": {"rollout_zero_std_groups": "0.9+0" + HOURS},
    "MyxoResponsesTruncated": {"rollout_truncated_ratio": "0.5+0" + HOURS},
    "MyxoPushesSlower": {"perf_update_weights_time": "4+0x330 20+0x30"},
    "MyxoSpeculationSlower": {"speculation_gain": "0.8+0" + HOURS},
    "MyxoTrainerWaits": {"perf_wait_time_ratio": "0.6+0" + HOURS},
}
"""Series at whose end each alert fires."""

QUIET: dict[str, dict[str, str]] = {
    "all is well": STEADY
    | {
        "generated_tokens_per_s": "50+0" + HOURS,
        "queue_task": "5+0" + HOURS,
        f"queue_lag{GENERATED}": "3+0" + HOURS,
        "store_bytes": "50+0" + HOURS,
        "store_max_bytes": "100+0" + HOURS,
        "train_loss": "-0.1+0" + HOURS,
        "train_grad_norm": "0.5+0" + HOURS,
        "train_agreement_abs_diff": "1+0" + HOURS,
        "train_agreement_tokens": "100+0" + HOURS,
        "rollout_rollout_log_probs": "-0.7+0" + HOURS,
        "rollout_zero_std_groups": "0.3+0" + HOURS,
        "rollout_truncated_ratio": "0.1+0" + HOURS,
        "perf_update_weights_time": "0.1+0x330 0.4+0x30",
        "perf_wait_time_ratio": "0.2+0" + HOURS,
        "speculation_gain": "1+0" + HOURS,
    },
    "the run has ended, and its replicas have nothing to do": {
        "trained_steps": "3+0" + HOURS,
        "in_flight": "0+0" + HOURS,
        "generated_tokens_per_s": "0+0" + HOURS,
        "queue_task": "0+0" + HOURS,
    },
    "a young run loads its engines": {
        "trained_steps": "_x341 0+0x20",
        "in_flight": "_x341 8+0x20",
        "generated_tokens_per_s": "_x349 0+0x12",
        "queue_task": "_x341 5+0x20",
    },
    "a replica evaluates, and no evaluation is due": {
        "generated_tokens_per_s": "0+0" + HOURS,
        "eval_replica": "1+0" + HOURS,
        "queue_task": "5+0" + HOURS,
    },
    "a store without a bound": {"store_bytes": "86+0" + HOURS, "store_max_bytes": "0+0" + HOURS},
    "no two log-probs of one version": {"train_agreement_abs_diff": "0+0" + HOURS, "train_agreement_tokens": "0+0" + HOURS},
    "one group of a small run has died": {"dead": "0+0x359 1", "admitted": "0+0" + HOURS},
}


def firing(promtool: str, directory: Path, cases: dict[str, dict[str, str]]) -> dict[str, set[str]]:
    """The alerts that fire after six hours of each case's series, as promtool says in its complaints that none was expected."""
    tests = [
        {
            "name": name,
            "interval": "1m",
            "input_series": [{"series": metric, "values": points} for metric, points in series(**values).items()],
            "alert_rule_test": [{"eval_time": "6h", "alertname": alert, "exp_alerts": []} for alert in alerts()],
        }
        for name, values in cases.items()
    ]
    fired: dict[str, set[str]] = {}
    for test in tests:
        path = directory / "tests.yml"
        path.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "evaluation_interval": "1m", "tests": [test]}))
        done = subprocess.run([promtool, "test", "rules", str(path)], capture_output=True, text=True, timeout=120)
        said = done.stdout + done.stderr
        assert done.returncode == 0 or "alertname:" in said, said
        fired[str(test["name"])] = set(re.findall(r"alertname: (\w+), time", said))
    return fired


@pytest.mark.extra
def test_every_alert_fires_at_what_it_is_for_and_no_other_does(promtool: str, tmp_path: Path) -> None:
    assert FIRE.keys() == alerts().keys()
    assert firing(promtool, tmp_path, FIRE) == {name: {name} for name in FIRE}


def test_half_an_hour_without_a_step_is_enough(promtool: str, tmp_path: Path) -> None:
    stuck = {"trained_steps": "_x328 3+0x40", "in_flight": "8+0" + HOURS}
    idle = {"generated_tokens_per_s": "_x343 0+0x40", "queue_task": "5+0" + HOURS}
    assert firing(promtool, tmp_path, {"stuck": stuck, "idle": idle}) == {"stuck": {"MyxoNoStep"}, "idle": {"MyxoReplicaIdle"}}


def test_no_alert_fires_while_there_is_no_reason(promtool: str, tmp_path: Path) -> None:
    assert firing(promtool, tmp_path, QUIET) == {name: set() for name in QUIET}


def test_prometheus_reads_the_config_and_every_query(promtool: str, tmp_path: Path) -> None:
    (tmp_path / "alerts.yml").write_text(ALERTS.read_text())
    config = (MONITORING / "prometheus.yml").read_text().replace("/etc/prometheus/alerts.yml", str(tmp_path / "alerts.yml"))
    (tmp_path / "prometheus.yml").write_text(config)
    subprocess.run([promtool, "check", "config", str(tmp_path / "prometheus.yml")], check=True, timeout=60)
    rules: dict[str, Any] = {"groups": [{"name": "all", "rules": [{"record": f"q{i}", "expr": text} for i, text in enumerate(queries())]}]}
    (tmp_path / "queries.yml").write_text(yaml.safe_dump(rules))
    subprocess.run([promtool, "check", "rules", str(tmp_path / "queries.yml")], check=True, timeout=60)


def test_every_alert_says_what_to_do_and_is_in_the_docs() -> None:
    page = (DOCS / "monitoring.md").read_text()
    assert set(re.findall(r"^\| `(Myxo\w+)`", page, re.MULTILINE)) == alerts().keys()
    for rule in alerts().values():
        assert rule["annotations"].keys() == {"summary", "description"} and rule["labels"]["severity"] in ("info", "warning", "critical")


def test_every_panel_shows_one_run_and_has_a_unit() -> None:
    names = [panel["title"] for panel in panels()]
    assert len(names) == len(set(names)) > 10
    for panel in panels():
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert "myxo_" not in target["expr"] or 'run="$run"' in target["expr"], panel["title"]
    assert len(metrics_asked_for()) > 30


def test_prometheus_looks_for_every_service_of_the_stack() -> None:
    (job,) = yaml.safe_load((MONITORING / "prometheus.yml").read_text())["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    stack = yaml.safe_load((MONITORING.parent / "compose.yaml").read_text())["services"]
    tools = {"watch", "myxo"}
    services = {name for name, one in stack.items() if one.get("restart") and "MYXO_HTTP" in (one.get("environment") or {})} - tools
    assert services <= set(found["names"]) <= services | {"console"} and found["port"] == 9464
    for name in ("prometheus", "grafana"):
        assert stack[name]["profiles"] == ["monitoring"] and "@sha256:" in stack[name]["image"]
    assert stack["grafana"]["networks"] == ["monitoring"], "it reaches nothing of the run"
    assert [port.split(":")[0] for port in stack["grafana"]["ports"]] == ["127.0.0.1"]


def test_the_example_for_keda_asks_for_a_number_of_groups() -> None:
    example = scaled_object()
    assert (example["kind"], example["apiVersion"]) == ("ScaledObject", "keda.sh/v1alpha1")
    (trigger,) = example["spec"]["triggers"]
    assert trigger["type"] == "prometheus" and trigger["metadata"]["query"].startswith("sum(")
    assert float(trigger["metadata"]["threshold"]) > 0 and example["spec"]["minReplicaCount"] >= 1
