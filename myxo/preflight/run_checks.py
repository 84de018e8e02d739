"""Whether a run of that name is there already, with another config."""

from __future__ import annotations

from collections.abc import Iterator

from myxo.preflight.inspection import Inspection
from myxo.run.run_directory import RunDirectory
from shared.bus import runs
from shared.runtime import server_urls
from shared.runtime.errors import ConfigError


def check(inspection: Inspection) -> Iterator[ConfigError]:
    """Yields each field in which the run that lies in the run's directory differs and may not; of a run on a given bus, the bus knows."""
    directory = RunDirectory(inspection.config.run.root)
    if inspection.fresh or not inspection.starts or server_urls.nats_url() or not directory.nats.is_dir():
        return
    if (frozen := runs.frozen(directory.root)) is not None:
        yield from runs.differences(frozen, inspection.frozen or inspection.config)
