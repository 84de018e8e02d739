"""``python -m services.trainer [critic]``: the trainer of the run named by MYXO_RUN, or its critic, one process a rank."""

import os
import secrets
import sys

from services.trainer.rank import SERVICES, read_run
from shared.config.run_config import RunConfig
from shared.runtime.child_process import die_with_parent
from shared.runtime.own_address import LOOPBACK, listening_interfaces
from shared.runtime.service_base import exit_code


def launch(role: str) -> None:
    """Becomes the only rank, or starts all ranks under torchrun and waits for them; becomes the recorder of a run that trains nothing.

    Args:
        role: actor or critic.
    """
    config, _ = read_run()
    if config.debug.debug_rollout_only:
        os.execv(sys.executable, [sys.executable, "-m", "services.trainer.rollout_recorder"])
    prepare_environment(config)
    ranks = config.trainer.ranks(role)
    if ranks == 1:
        os.execv(sys.executable, [sys.executable, "-m", "services.trainer.rank", role])
    run_ranks(ranks, "services.trainer.rank", role)


def prepare_environment(config: RunConfig) -> None:
    """Sets the environment variables that every rank's libraries read when they are imported, those of ``train_env_vars`` first."""
    os.environ |= config.trainer.train_env_vars
    os.environ.setdefault("OMP_NUM_THREADS", str(config.trainer.torch_threads or 1))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads must not spin on cores that an engine may want
    if config.trainer.train_device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in listening_interfaces().items():
        os.environ.setdefault(name, value)
    # both ends of a weight push must agree on these; SGLang sets them for itself
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


def run_ranks(ranks: int, *module: str) -> None:
    """Runs torchrun with its static rendezvous on loopback; the first failed rank's exit code becomes this process's.

    torchrun's other rendezvous, ``c10d`` (also behind ``--standalone``), unpickles what anybody writes to its port. And each TCP store that
    torch opens by itself listens on all addresses. The static one takes the store that this process has already for its port.

    Args:
        module: what each rank runs, and its arguments.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    from shared.transfer.bound_store import BoundStore

    store = BoundStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    where = ["--rdzv-backend", "static", "--master-addr", LOOPBACK, "--master-port", str(store.port), "--rdzv-id", secrets.token_hex(16)]
    job = ["--nnodes", "1", "--node-rank", "0", "--nproc-per-node", str(ranks), "--max-restarts", "0", "-m", *module]
    try:
        run(get_args_parser().parse_args([*where, *job]))
    except SignalException:
        pass  # this process was asked to stop: torchrun has passed the signal on and waited for the ranks
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if 0 < failure.exitcode < 128 else 1)


if __name__ == "__main__":
    die_with_parent()
    role = sys.argv[1] if len(sys.argv) > 1 else "actor"
    if role not in SERVICES or len(sys.argv) > 2:
        sys.exit("usage: python -m services.trainer [actor | critic]")
    sys.exit(exit_code(SERVICES[role], lambda: launch(role)))
