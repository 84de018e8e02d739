"""The metrics that a service declares, for its stand-in: read from the source, for to import the service takes seconds."""

from pathlib import Path

from docs.metrics_page import tables_in
from shared.runtime.telemetry import declare_metrics

SERVICES = Path(__file__).resolve().parents[2] / "services"


def declare_as(*modules: str) -> None:
    """Declares what the real modules declare. ``modules``: paths below services/."""
    for module in modules:
        tables = tables_in((SERVICES / module).read_text())
        assert tables, f"{module} declares nothing"
        declare_metrics("\n".join(tables))
