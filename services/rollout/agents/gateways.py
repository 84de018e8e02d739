"""Finds a gateway for a session: the one behind `MYXO_GATEWAY_URL`, or any that is alive by the registry."""

from shared.runtime.service_base import Service


class Gateways:
    """The gateways of a run, each session at the next one."""

    def __init__(self, service: Service) -> None:
        self._service, self._next = service, 0

    async def base_url(self) -> str:
        """Returns the base URL that a session's client gets. Raises DeadlineExceeded where no gateway comes alive."""
        raise NotImplementedError
