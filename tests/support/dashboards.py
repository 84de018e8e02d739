"""What the monitoring's dashboards and alerts ask Prometheus for."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

MONITORING = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "monitoring"
ALERTS = MONITORING / "alerts.yml"
DOCS = MONITORING.parents[2] / "docs"

_NAME = re.compile(r"\bmyxo_\w+")


def alerts() -> dict[str, dict[str, Any]]:
    """The rules by their names."""
    return {rule["alert"]: rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]}


def panels() -> Iterator[dict[str, Any]]:
    for path in sorted((MONITORING / "grafana" / "dashboards").glob("*.json")):
        yield from (panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row")


def scaled_object() -> dict[str, Any]:
    """The example for KEDA in docs/monitoring.md."""
    page = (DOCS / "monitoring.md").read_text().split("<!-- keda:")[1].split("<!-- /keda -->")[0]
    content: dict[str, Any] = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    return content


def queries() -> list[str]:
    """All expressions: of alerts, panels and the example for KEDA; a dashboard's variables stand for any value."""
    found = [rule["expr"] for rule in alerts().values()]
    found += [target["expr"].replace("$run", "r") for panel in panels() for target in panel["targets"]]
    found += [trigger["metadata"]["query"] for trigger in scaled_object()["spec"]["triggers"]]
    return found


def metrics_asked_for() -> set[str]:
    return {name for query in queries() for name in _NAME.findall(query)}


def metrics_told(text: str) -> set[str]:
    """The names of the samples in what a service's /metrics answers."""
    return {name for line in text.splitlines() if not line.startswith("#") for name in _NAME.findall(line)[:1]}
