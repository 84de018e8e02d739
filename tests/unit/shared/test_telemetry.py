"""Metrics and logs: their names, their declarations and their files."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from prometheus_client import generate_latest
from torch.utils.tensorboard import SummaryWriter

from docs import metrics_page
from docs.metrics_page import declared_metrics, exported_name
from shared.data.metric_files import METRIC_LINES, MetricDirectory, Scalar
from shared.runtime.tasks import SAME_LINES
from shared.runtime.telemetry import STRICT, Metrics, MetricSpec, UndeclaredMetric, allow_users, declare_metrics, spec_of
from tests.support.dashboards import metrics_asked_for

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


# --- every metric that a service writes is declared, with its labels; dashboard, alerts and docs ask for declared ones alone

ROOT = Path(__file__).parents[3]
SPECS = [spec for specs in declared_metrics().values() for spec in specs]


def written() -> Iterator[tuple[str, str, set[str]]]:
    """Names in calls of a service's ``metrics.set`` and ``metrics.add`` that are written out, with where and their labels."""
    for path in sorted(path for package in ("services", "shared") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and re.search(r"\bmetrics\.(set|add)$", ast.unparse(node.func)) and node.args):
                continue
            labels = {str(word.arg) for word in node.keywords} - {"in_status"}
            if isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), str(path.relative_to(ROOT)), labels


def test_each_name_in_the_source_is_declared_with_its_labels() -> None:
    found = list(written())
    assert len(found) > 40
    for name, place, labels in found:
        assert [spec for spec in SPECS if spec.pattern.fullmatch(name) and set(spec.labels) == labels], f"{place} writes {name}"


def test_each_declared_name_stands_in_the_source_besides() -> None:
    """The figures of the trainer's steps are held to the code by tests/unit/trainer/test_batch_metrics.py."""
    text = "\n".join(path.read_text() for package in ("services", "shared") for path in (ROOT / package).rglob("*.py"))
    for table, specs in declared_metrics().items():
        for spec in () if table.endswith("/") else specs:
            name = re.sub("^(queue|eval)_", "", re.split("<", spec.name)[0]).removesuffix("_held")
            assert re.search(rf'["_]{re.escape(name)}["{{<]', text), f"{spec.name} is declared, and no module writes it"


def test_definitions_have_no_end_and_units_no_figures() -> None:
    for spec in SPECS:
        assert spec.definition and not spec.definition.endswith("."), spec.name
        assert len(spec.unit) < 16, spec.name


def test_what_is_asked_for_is_declared() -> None:
    names = metrics_asked_for()
    assert len(names) > 30
    unknown = {name for name in names if not any(exported_name(spec).fullmatch(name) for spec in SPECS)}
    assert not unknown, "dashboard, alerts or docs ask for what no module declares"


def test_an_undeclared_metric_is_an_error_in_tests() -> None:
    declare_metrics("""
    declared_here{of} | s | of this test
    here/<k>/mean | s | of this
        test | when tests run
    both/(mean;max) | s | (of this test; the longest)
    """)
    assert spec_of("here/a/mean") == MetricSpec("here/<k>/mean", "s", "of this test", "when tests run")
    assert [spec_of("both/mean"), spec_of("both/max")] == [
        MetricSpec("both/mean", "s", "of this test"),
        MetricSpec("both/max", "s", "the longest"),
    ]
    metrics = Metrics("r", "b-1")
    metrics.set("declared_here", 1.0, of="a")
    metrics.set("here/a/b/mean", 1.0)
    for write in (
        lambda: metrics.set("declared_nowhere", 1.0),
        lambda: metrics.set("here/a/median", 1.0),
        lambda: Metrics("r", "b-2").add("declared_here", of="a"),
        lambda: Metrics("r", "b-2").set("declared_here", 1.0),
    ):
        with pytest.raises(UndeclaredMetric, match="declared"):
            write()
    allow_users(["users/own name"])
    metrics.set("users/own name", 1.0)
    assert spec_of("declared_nowhere") is None


def test_elsewhere_it_is_written_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STRICT)
    with structlog.testing.capture_logs() as logs:
        for instance in ("b-1", "b-2"):
            metrics = Metrics("r", instance)
            metrics.set("of_a_newer_release", 2.0)
            assert "myxo_of_a_newer_release" in generate_latest(metrics.registry).decode()
    assert [log["metric"] for log in logs] == ["of_a_newer_release"]


def test_a_table_without_a_place_on_the_page_is_told() -> None:
    tables = {"buffer": [MetricSpec("x", "", "y")]}
    assert metrics_page.misplaced(tables, "<!-- metrics: buffer -->\n<!-- /metrics -->") == []
    assert "no place" in metrics_page.misplaced(tables, "")[0]
    assert "no module" in metrics_page.misplaced({}, "<!-- metrics: buffer -->\n<!-- /metrics -->")[0]
    page = metrics_page.render(tables, "before\n<!-- metrics: buffer -->\nold\n<!-- /metrics -->\nafter")
    assert "old" not in page and "| `x` | | y |" in page and page.startswith("before") and page.endswith("after")


# --- the lines of metrics are read as they grow, whatever a trainer that died has left; event files alone are read with tensorboard


def test_lines_are_read_once_and_anew_where_they_were_written_anew(tmp_path: Path) -> None:
    directory, lines = MetricDirectory(tmp_path / "tensorboard"), tmp_path / "tensorboard" / METRIC_LINES
    assert list(directory.read()) == [], "there is no such directory yet"
    lines.parent.mkdir()
    lines.write_text('[17.5, 0, {"train/loss": 0.5, "rewards/größe/mean": Infinity}]\n[18.0, 1, {"train/l')
    assert list(directory.read()) == [Scalar("train/loss", 0, 0.5, 17.5), Scalar("rewards/größe/mean", 0, float("inf"), 17.5)]
    with lines.open("a") as file:
        file.write('\n[19.0, 1, {"train/loss": 0.25}]\n"no line"\n[NaN, 2, {"a": 1}]\n[20.0, 2, {"a": null}]\n[20.0, "x", {"a": 1}]\n')
    assert list(directory.read()) == [Scalar("train/loss", 1, 0.25, 19.0)], "what is cut off, or no line, is passed over"
    assert list(directory.read()) == []
    lines.with_name("new").write_text('[21.0, 1, {"train/loss": 0.125}]\n')
    lines.with_name("new").replace(lines)
    assert list(directory.read()) == [Scalar("train/loss", 1, 0.125, 21.0)]
    lines.unlink()
    lines.mkdir()
    assert list(directory.read()) == [] and "Is a directory" in directory.unreadable
    lines.rmdir()
    assert list(directory.read()) == [] and not directory.unreadable, "it is asked for again"


def test_event_files_of_an_earlier_release_are_read_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, writer = MetricDirectory(tmp_path), SummaryWriter(str(tmp_path))
    for step in range(2):
        writer.add_scalar("train/loss", 0.5, step, walltime=17.5)
        writer.add_text("note", "no number", step)
        writer.flush()
        assert list(directory.read()) == [Scalar("train/loss", step, 0.5, 17.5)]
    writer.close()
    assert not directory.unreadable
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_file_loader", None)
    without = MetricDirectory(tmp_path)
    assert list(without.read()) == [] and "tensorboard" in without.unreadable
