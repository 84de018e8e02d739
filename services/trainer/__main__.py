"""``python -m services.trainer``: the trainer of the run named by MYXO_RUN, one process a rank."""

from __future__ import annotations

import os
import sys

from services.trainer.rank import read_run
from shared.embedded import die_with_parent
from shared.service import exit_code


def launch() -> None:
    """Becomes the only rank, or starts all ranks under torchrun and waits for them."""
    config, _ = read_run()
    os.environ.setdefault("OMP_NUM_THREADS", str(config.trainer.torch_threads or 1))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads must not spin on cores that an engine may want
    if config.trainer.train_device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # both ends of a weight push must agree on these; SGLang sets them for itself
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    ranks = config.trainer.actor_num_gpus_per_node
    if ranks == 1:
        os.execv(sys.executable, [sys.executable, "-m", "services.trainer.rank"])
    run_ranks(ranks)


def run_ranks(ranks: int) -> None:
    """torchrun with its own rendezvous on a free port; the first rank's exit code becomes this process's."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import get_args_parser, run

    arguments = get_args_parser().parse_args(
        ["--standalone", "--nnodes", "1", "--nproc-per-node", str(ranks), "--max-restarts", "0", "-m", "services.trainer.rank"]
    )
    try:
        run(arguments)
    except SignalException:
        pass  # asked to stop: torchrun has passed it on and waited for the ranks
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        sys.exit(failure.exitcode if 0 < failure.exitcode < 128 else 1)


if __name__ == "__main__":
    die_with_parent()
    sys.exit(exit_code("trainer", launch))
