"""An environment that answers on the run's bus: plain MessagePack maps, request and reply."""

from __future__ import annotations

from typing import Any

from nats.errors import NoRespondersError

from shared.bus.connection import Bus, NotPermitted
from shared.bus.subjects import Subjects
from shared.environment.environment_client import Environment
from shared.environment.environment_url import EnvironmentUrl
from shared.environment.protocol import MAX_ANSWER, EnvironmentAway, EnvironmentFailed
from shared.runtime.errors import BadMessage, MessageTooLarge
from shared.schema import codec


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
            raise EnvironmentFailed(self.whom, f"the request does not go into MessagePack: {error}") from error
        try:
            answer = await self._bus.ask(subject, payload, deadline=deadline, whom=self.whom)
        except NoRespondersError:
            raise EnvironmentAway(self.whom, f"nobody answers on {subject}") from None
        except NotPermitted as error:
            raise EnvironmentFailed(self.whom, str(error)) from error
        except MessageTooLarge as error:
            raise EnvironmentFailed(self.whom, f"the request is too large: {error}") from error
        if len(answer) > MAX_ANSWER:
            raise EnvironmentFailed(self.whom, f"answered {len(answer)} bytes; expected at most {MAX_ANSWER}")
        try:
            return codec.unpack(answer)
        except BadMessage as error:
            raise EnvironmentFailed(self.whom, f"expected a MessagePack map: {error}") from error

    async def close(self) -> None:
        pass
