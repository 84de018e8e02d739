"""Checks that gateways can open their door for groups from outside."""

from collections.abc import Iterator

from myxo.preflight.inspection import Findings, Inspection, Note
from shared.config.ingest_key import ingest_key
from shared.runtime.errors import ConfigError


def check_ingest(inspection: Inspection) -> Findings:
    """Yields a key that is not set where the gateways start, and a note where none starts here."""
    mode, gateways = inspection.config.ingest.ingest_groups, inspection.config.gateways
    if mode == "off":
        return
    if gateways and inspection.starts:
        yield from _missing_key()
    if not gateways:
        yield Note(f"ingest_groups is {mode} and gateway_replicas 0: groups come in by gateways that are started elsewhere")


def _missing_key() -> Iterator[ConfigError]:
    try:
        ingest_key()
    except ConfigError as error:
        yield error
