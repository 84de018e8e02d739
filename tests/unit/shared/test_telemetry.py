"""Metrics under legal Prometheus names, and logs as JSON lines that say who speaks."""

import json
import subprocess
import sys

from prometheus_client import generate_latest

from shared.runtime.tasks import SAME_LINES
from shared.runtime.telemetry import Metrics, declare_metrics

declare_metrics("""
    ready | groups | of this test
    train/kl-loss | nats | of this test
    rewards/<part>/mean | reward | of this test
    samples_scored_total | samples | of this test
    groups_scored_total{environment} | groups | of this test
    depth{environment} | | of this test
""")

SPEAK = """
import logging, structlog
from shared.runtime.telemetry import configure_logs
configure_logs("r", "buffer", "b-1", level="WARNING")
structlog.get_logger().info("quiet")
structlog.get_logger().warning("event", group="g1")
logging.getLogger("library").error("words of a library")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger().exception("failed")
"""


REPEAT = """
import structlog
from shared.runtime.tasks import SAME_LINES, print_traceback
from shared.runtime.telemetry import configure_logs
configure_logs("r", "buffer", "b-1")
for number in range(3 * SAME_LINES):
    structlog.get_logger().error("group_refused", group=number, error=f"your function failed for group {number}")
    structlog.get_logger().info("progress", number=number)
    try:
        raise ValueError(f"no label in {number}")
    except ValueError:
        print_traceback()
structlog.get_logger().error("group_refused", error="something else")
"""


def test_warnings_of_one_kind_do_not_fill_the_log() -> None:
    done = subprocess.run([sys.executable, "-c", REPEAT], capture_output=True, text=True, timeout=60)
    assert done.stderr.count("Traceback") == SAME_LINES
    lines = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    refused = [line for line in lines if line["event"] == "group_refused"]
    assert len(refused) == SAME_LINES + 1 and "left out" in refused[-2]["further"] and refused[-1]["error"] == "something else"
    assert sum(line["event"] == "progress" for line in lines) == 3 * SAME_LINES


def test_metrics_carry_run_and_instance() -> None:
    metrics = Metrics("r", "b-1")
    metrics.set("ready", 3)
    metrics.set("ready", 4)
    metrics.set("train/kl-loss", 0.5)
    metrics.set("rewards/längé/mean", 1.0)
    metrics.add("samples_scored", 2)
    metrics.add("samples_scored")
    text = generate_latest(metrics.registry).decode()
    assert 'myxo_ready{instance="b-1",run="r"} 4.0' in text
    assert 'myxo_train_kl_loss{instance="b-1",run="r"} 0.5' in text
    assert 'myxo_rewards_lue4ngue9_mean{instance="b-1",run="r"} 1.0' in text
    assert 'myxo_samples_scored_total{instance="b-1",run="r"} 3.0' in text
    assert metrics.values == {"ready": 4.0, "train/kl-loss": 0.5, "rewards/längé/mean": 1.0, "samples_scored": 3.0}


def test_a_metric_may_have_labels_of_its_own() -> None:
    metrics = Metrics("r", "b-1")
    metrics.add("groups_scored", environment="unit-tests")
    metrics.add("groups_scored", 2, environment="unit_tests")
    metrics.set("depth", 5, environment="math")
    text = generate_latest(metrics.registry).decode()
    assert 'myxo_groups_scored_total{environment="unit-tests",instance="b-1",run="r"} 1.0' in text
    assert 'myxo_groups_scored_total{environment="unit_tests",instance="b-1",run="r"} 2.0' in text
    assert 'myxo_depth{environment="math",instance="b-1",run="r"} 5.0' in text
    assert metrics.values == {"groups_scored.unit-tests": 1.0, "groups_scored.unit_tests": 2.0, "depth.math": 5.0}


def test_every_log_line_is_json_with_the_ids_of_who_speaks() -> None:
    spoken = subprocess.run([sys.executable, "-c", SPEAK], capture_output=True, text=True, timeout=60, check=True)
    assert spoken.stdout == ""
    lines = [json.loads(line) for line in spoken.stderr.splitlines()]
    assert [line["event"] for line in lines] == ["event", "words of a library", "failed"]
    for line in lines:
        assert (line["run"], line["service"], line["instance"]) == ("r", "buffer", "b-1")
        assert line["timestamp"].endswith("Z")
    assert lines[0]["group"] == "g1"
    assert lines[1]["logger"] == "library"
    assert "ZeroDivisionError" in lines[2]["exception"]
