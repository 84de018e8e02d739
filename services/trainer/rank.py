"""One rank of the trainer: ``python -m services.trainer.rank ROLE`` under torchrun, or alone as a world of one."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from shared.runtime import quick_imports

with quick_imports():
    from services.trainer.torchrun import tell_failure
    from shared.config.run_config import RunConfig
    from shared.process.child_process import die_with_parent
    from shared.runtime import exit_codes, tasks
    from shared.runtime.errors import DeadlineExceeded
    from shared.runtime.telemetry import last_error
    from shared.service.service_base import connect, exit_code

SERVICES = {"actor": "trainer", "critic": "critic"}  # the name of each role in the registry and the logs


def main(role: str) -> None:
    """Runs this rank. Rank 0 stays connected to the bus and reads the config from it; the others read it over a short connection.

    Args:
        role: actor or critic.
    """
    with quick_imports():
        import torch

        from services.trainer.actor_critic_exchange import ActorCriticExchange
        from services.trainer.command_worker import CommandWorker
        from services.trainer.control_client import ControlClient
        from services.trainer.critic import Critic
        from services.trainer.loop import Trainer
        from shared.store.payload_store import BlockingStore

    if torchrun := "TORCHELASTIC_RUN_ID" in os.environ:
        tasks.arm(before_exit=end_all)
    control: ControlClient | None = None
    with contextlib.ExitStack() as stack:
        if int(os.environ.get("RANK", "0")) == 0:
            control = stack.enter_context(ControlClient(SERVICES[role]))
            config, redis_url = control.config, control.service.redis_url
        else:
            config, redis_url = read_run()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 gets the signal and commands all ranks to leave
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if config.trainer.torch_threads is not None:
            torch.set_num_threads(config.trainer.torch_threads)
        exchange = ActorCriticExchange(redis_url, config.run.name) if config.algorithm.has_critic else None
        store = BlockingStore(redis_url, config.run.name)
        worker: Trainer | Critic | CommandWorker
        if config.tinker.tinker_endpoint:
            worker = CommandWorker(config, store, control)
        elif role == "actor":
            worker = Trainer(config, store, control, exchange)
        else:
            assert exchange is not None  # the critic is only started for an objective that has one
            worker = Critic(config, store, control, exchange)
        stack.callback(worker.close)
        worker.run()
    if control is not None and control.stopping and not torchrun:  # several leave together, and `run_ranks` says so
        sys.exit(exit_codes.STOPPED)


def end_all() -> None:
    """Reports why this rank is ended by force, and ends the others."""
    tell_failure(last_error.text, consequence=False)
    kill_siblings()


def kill_siblings() -> None:
    """Ends the other ranks of this process's torchrun, which would otherwise give them half a minute to end in order."""
    parent = os.getppid()
    for pid in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
        if pid != os.getpid():
            os.kill(pid, signal.SIGKILL)


def reported(work: Callable[[], None]) -> None:
    """Runs a rank's work; torchrun learns why it failed. That another rank went away is no cause of its own."""
    try:
        work()
    except Exception as error:
        tell_failure(tasks.describe(error), isinstance(error, DeadlineExceeded) or type(error).__name__ in ("PeerLost", "PeerFailed"))
        raise


def read_run() -> tuple[RunConfig, str]:
    """Returns the run's config and the store's URL, read from the bus."""

    async def read() -> tuple[RunConfig, str]:
        async with contextlib.aclosing(await connect("trainer")) as service:
            return service.config, service.redis_url

    return asyncio.run(read())


if __name__ == "__main__":
    die_with_parent()
    sys.exit(exit_code(SERVICES[sys.argv[1]], lambda: reported(lambda: main(sys.argv[1]))))
