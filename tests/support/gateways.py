"""Real gateways of a run, and sessions that their clients play."""

import time
import uuid
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from shared.bus.registry import Registry
from shared.schema.messages import Sampling
from shared.schema.service_messages import ServiceStatus
from shared.sessions.session import Session, SessionLog, new_key
from shared.sessions.session_store import SessionStore
from tests.support.service_process import ServiceProcess
from tests.support.waiting import until

READY_SECONDS = 120.0


def started_gateway(number: int, directory: Path, environment: dict[str, str]) -> ServiceProcess:
    """A gateway process; use it as a context manager."""
    name = f"gateway-{number}"
    return ServiceProcess("gateway", directory / f"{name}.log", {**environment, "MYXO_INSTANCE": name})


async def ready_gateway(registry: Registry, number: int, process: ServiceProcess, unlike: str = "") -> str:
    """Waits until a gateway serves; returns its URL. ``unlike``: the incarnation of the life before."""

    async def found() -> ServiceStatus | None:
        assert process.process.poll() is None, process.words()
        statuses = await registry.alive("gateway")
        return next((one for one in statuses if one.instance == f"gateway-{number}" and one.engine and one.incarnation != unlike), None)

    status = await until(found, f"gateway-{number}", READY_SECONDS)
    return str(status.engine)


class Played:
    """A session and its client."""

    def __init__(self, sessions: SessionStore, session: Session, key: str) -> None:
        self.sessions, self.session, self.key = sessions, session, key

    @classmethod
    async def opened(cls, sessions: SessionStore, **fields: Any) -> "Played":
        name = uuid.uuid4().hex
        key, digest = new_key(name)
        base = {"group": "g00000001", "rollout": 0, "attempt": 0, "deadline": time.time() + 600}
        base["sampling"] = Sampling(temperature=1.0, max_new_tokens=24)
        session = Session(id=name, key_digest=digest, **{**base, **fields})
        await sessions.open(session)
        return cls(sessions, session, key)

    def client(self, url: str, **options: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{url}/v1", api_key=self.key, **options)

    async def log(self) -> SessionLog:
        return await self.sessions.read(self.session.id)
