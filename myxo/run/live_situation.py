"""What a command that looks at a live run from outside knows of its waits."""

from collections.abc import Sequence

from myxo.run.run_access import Access
from shared.bus.registry import Registry
from shared.schema.service_messages import ServiceStatus
from shared.view.run_view import read_failures
from shared.view.stall import RunSituation, told_by


async def live_situation(access: Access, services: Sequence[ServiceStatus]) -> RunSituation:
    """Returns the situation of a live run, with the wait that its launcher tells of. Raises `BUS_ERRORS`."""
    told = told_by(await Registry(access.bus, access.run).launcher())
    errors = (await read_failures(access.bus, access.run)).errors if told is None else {}
    return RunSituation.of(access.config, services, told=told, errors=errors)
