"""One rank of the trainer: ``python -m services.trainer.rank ROLE`` under torchrun, or alone as a world of one."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

from shared.runtime import failures
from shared.runtime.child_process import die_with_parent

SERVICES = {"actor": "trainer", "critic": "critic"}
"""What each role is called in the registry and the logs."""


def main(role: str) -> None:
    """Rank 0 holds the link to the bus and reads the config from it; the others read it by a short connection of their own.

    Args:
        role: actor or critic.
    """
    import torch

    from services.trainer.actor_critic_exchange import ActorCriticExchange
    from services.trainer.control_client import ControlClient
    from services.trainer.critic import Critic
    from services.trainer.loop import Trainer
    from shared.store.payload_store import BlockingStore

    if "TORCHELASTIC_RUN_ID" in os.environ:
        failures.arm(last_act=kill_siblings)
    rank = int(os.environ.get("RANK", "0"))
    with contextlib.ExitStack() as stack:
        if rank == 0:
            link = stack.enter_context(ControlClient(SERVICES[role]))
            config, redis_url = link.config, link.service.redis_url
        else:
            link = None
            config, redis_url = read_run()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 hears it and tells everyone
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if config.trainer.torch_threads is not None:
            torch.set_num_threads(config.trainer.torch_threads)
        exchange = ActorCriticExchange(redis_url, config.run.name) if config.algorithm.has_critic else None
        trainer = (Trainer if role == "actor" else Critic)(config, BlockingStore(redis_url), link, exchange)
        stack.callback(trainer.close)
        trainer.run()


def kill_siblings() -> None:
    """Ends the other ranks of this process's torchrun, which would otherwise give them half a minute to end in order."""
    parent = os.getppid()
    for pid in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)


def read_run():  # type: ignore[no-untyped-def]
    """(config, Redis URL) of the run, read from the bus."""
    import asyncio

    from shared.runtime.service_base import connect

    async def read():  # type: ignore[no-untyped-def]
        service = await connect("trainer")
        try:
            return service.config, service.redis_url
        finally:
            await service.store.close()
            await service.bus.close()

    return asyncio.run(read())


if __name__ == "__main__":
    die_with_parent()
    from shared.runtime.service_base import exit_code

    sys.exit(exit_code(SERVICES[sys.argv[1]], lambda: main(sys.argv[1])))
