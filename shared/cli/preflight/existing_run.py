"""Whether a run of that name is there already, with another config."""

from __future__ import annotations

from collections.abc import Iterator

from shared import addresses, runs
from shared.cli.preflight.inspection import Inspection
from shared.cli.rundir import RunDirectory
from shared.errors import ConfigError


def check(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields each field in which the run that lies in the run's directory differs and may not; of a run on a given bus, the bus knows."""
    directory = RunDirectory(inspection.config.run.root)
    if inspection.fresh or not inspection.starts or addresses.nats_url() or not directory.nats.is_dir():
        return
    if (frozen := runs.frozen(directory.root)) is not None:
        yield from runs.differences(frozen, inspection.frozen or inspection.config)
