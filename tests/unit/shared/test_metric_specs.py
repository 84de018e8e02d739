"""Every metric that a service writes is declared, with its labels; dashboard, alerts and docs ask for declared ones alone."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from prometheus_client import generate_latest

from docs import metrics_page
from docs.metrics_page import declared_metrics, exported_name
from shared.runtime.telemetry import STRICT, Metrics, MetricSpec, UndeclaredMetric, allow_users, declare_metrics, spec_of
from tests.support.dashboards import metrics_asked_for

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
    """The figures of the trainer's steps are held to the code by tests/unit/trainer/test_metrics_page.py."""
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
    """)
    assert spec_of("here/a/mean") == MetricSpec("here/<k>/mean", "s", "of this test", "when tests run")
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
