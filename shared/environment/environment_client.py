"""Opens an environment by its address, and speaks to those that answer on the run's bus: MessagePack maps, by request and reply."""

from typing import Any

from nats.errors import NoRespondersError

from shared.bus.connection import Bus, NotPermitted
from shared.bus.subjects import Subjects
from shared.environment.environment_url import EnvironmentUrl, parse
from shared.environment.protocol import MAX_ANSWER, Environment, EnvironmentAway, EnvironmentFailed
from shared.runtime.errors import BadMessage, ConfigError, MessageTooLarge
from shared.schema import codec


def open_environment(name: str, url: str, bus: Bus | None = None, run: str = "") -> Environment:
    """Returns the client for an address of `shared.environment.environment_url`; it connects with its first request. ``name``: of the
    environment in the run. ``bus``, ``run``: for ``nats:NAME``. Raises ConfigError for an address that is none."""
    try:
        address = parse(url)
    except ValueError as error:
        raise ConfigError(f"the URL of environment {name}", url.rpartition("@")[2], str(error)) from None
    if address.responder:
        if bus is None or not run:
            raise ConfigError(f"the URL of environment {name}", url, "an environment on the bus needs the run that it belongs to")
        return BusEnvironment(name, address, bus, run)
    from shared.environment.http_environment import HttpEnvironment  # aiohttp comes with the extra `reward`

    return HttpEnvironment(name, address)


class BusEnvironment(Environment):
    """Instances of one environment share a queue group, so that each request goes to one of them."""

    def __init__(self, name: str, address: EnvironmentUrl, bus: Bus, run: str) -> None:
        super().__init__(name, address.shown)
        self._bus, self._run, self._responder = bus, run, address.responder

    async def ask(self, verb: str, question: dict[str, Any] | None, deadline: float) -> object:
        subject = Subjects(self._run).environment(self._responder, verb)
        try:
            payload = codec.pack(question or {})
        except (TypeError, ValueError, OverflowError) as error:
            raise EnvironmentFailed(self.label, f"the request does not go into MessagePack: {error}") from error
        try:
            answer = await self._bus.ask(subject, payload, deadline=deadline, awaited_from=self.label)
        except NoRespondersError:
            raise EnvironmentAway(self.label, f"no reply on {subject}") from None
        except NotPermitted as error:
            raise EnvironmentFailed(self.label, str(error)) from error
        except MessageTooLarge as error:
            raise EnvironmentFailed(self.label, f"the request is too large: {error}") from error
        if len(answer) > MAX_ANSWER:
            raise EnvironmentFailed(self.label, f"answered {len(answer)} bytes; expected at most {MAX_ANSWER}")
        try:
            return codec.unpack(answer)
        except BadMessage as error:
            raise EnvironmentFailed(self.label, f"expected a MessagePack map: {error}") from error
