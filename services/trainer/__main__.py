"""``python -m services.trainer [critic]``: the trainer of the run named by MYXO_RUN, or its critic, one process a rank.

Of a trainer over several nodes it is one node's part (`services.trainer.trainer_node`), whose rank `shared.runtime.addresses` finds.
"""

import os
import sys

from shared.runtime import quick_imports

with quick_imports():
    from services.trainer.rank import SERVICES, read_run
    from services.trainer.torchrun import run_ranks
    from services.trainer.trainer_node import run_node
    from shared.config.run_config import RunConfig
    from shared.process.child_process import die_with_parent
    from shared.runtime.addresses import listening_interfaces, node_rank
    from shared.runtime.user_cache import kernel_cache_variables
    from shared.service.service_base import exit_code
    from shared.transfer import BATCH_INVARIANT


def launch(role: str) -> None:
    """Becomes the only rank, or starts all ranks under torchrun and waits for them, or serves as one node of several.

    It becomes the recorder of a run that trains nothing.

    Args:
        role: actor or critic.
    """
    config, _ = read_run()
    if config.debug.debug_rollout_only:
        os.execv(sys.executable, [sys.executable, "-m", "services.trainer.rollout_recorder"])
    prepare_environment(config)
    nodes, ranks = config.trainer.nodes(role), config.trainer.ranks_per_node(role)
    if nodes > 1:
        return run_node(SERVICES[role], role, node_rank(nodes))
    become_ranks(ranks, "services.trainer.rank", role)


def become_ranks(ranks: int, *module: str) -> None:
    """Becomes the only rank, as a new process since torch reads the environment when it is imported, or starts all of them."""
    for name, value in listening_interfaces().items():
        os.environ.setdefault(name, value)
    if ranks == 1:
        os.execv(sys.executable, [sys.executable, "-m", *module])
    run_ranks(ranks, *module)


def prepare_environment(config: RunConfig) -> None:
    """Sets the environment variables that every rank's libraries read when they are imported, those of ``train_env_vars`` first."""
    os.environ |= config.trainer.train_env_vars
    own = max(1, (os.cpu_count() or 1) // config.trainer.actor_num_gpus_per_node) if config.trainer.fsdp_cpu_offload else 1  # Adam's there
    os.environ.setdefault("OMP_NUM_THREADS", str(config.trainer.torch_threads or own))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # idle threads must not spin on cores that an engine may want
    if config.trainer.train_device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= kernel_cache_variables(os.environ)
    if config.rollout.alignment == "bitwise":
        os.environ[BATCH_INVARIANT] = "1"
    # both ends of a weight push must agree on these; SGLang sets them for itself
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


if __name__ == "__main__":
    die_with_parent()
    role = sys.argv[1] if len(sys.argv) > 1 else "actor"
    if role not in SERVICES or len(sys.argv) > 2:
        sys.exit("usage: python -m services.trainer [actor | critic]")
    sys.exit(exit_code(SERVICES[role], lambda: launch(role)))
