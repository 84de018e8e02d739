"""``python -m services.trainer.batch_replay CONFIG TEMPLATE [flags]``: trains the batches that a run has dumped, without bus, store and
engines.

Started by ``myxo replay``. Every rank runs it; the launcher starts more of them where the config asks for more. Everything else is the
trainer's own code: the same batches under the same config give the same steps, and with ``--deterministic`` the same bits.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.config import flags
from shared.config import run_config as configs
from shared.config.run_config import RunConfig
from shared.hub import hub_resolve
from shared.runtime.child_process import die_with_parent
from shared.runtime.errors import ConfigError
from shared.runtime.service_base import exit_code
from shared.schema.messages import BatchAnswer, EvalFigures, RunDone, Trained, WarmStartEnded

USAGE = """usage: myxo replay CONFIG TEMPLATE [flags]

Trains the batches again that a run has written with --save-debug-rollout-data TEMPLATE, without bus, store and engines. Each step's metrics
are a line of JSON on standard output; checkpoints, TensorBoard's files and the final weights lie in the run's directory with -replay behind
its name. Flags are laid over the config as by `myxo up`, --deterministic among them."""

CONFIG_VARIABLE = "MYXO_REPLAY_CONFIG"
"""The environment variable with the path of the config that the launcher has written for its ranks."""


class ReplayClient:
    """A stand-in for rank 0's `ControlClient`: batches come from files, and reports are printed."""

    stopping = False
    replicas: list[Any] = []
    evaluations: list[EvalFigures] = []

    def __init__(self, dumps: Any) -> None:
        self._dumps = dumps

    def batch(self, step: int, version: int, hold: bool = True) -> BatchAnswer:
        """Returns the batch of ``step``, or the answer that there are no more."""
        return self._dumps.batch(step) if step in self._dumps.steps else RunDone()

    def report(self, what: str, message: Trained | WarmStartEnded) -> None:
        """Prints a step as one line of JSON."""
        if isinstance(message, Trained):
            print(json.dumps({"step": message.step, "version": message.version, **message.metrics}), flush=True)

    def tell(self, what: str, detail: str) -> None:
        print(f"{what}: {detail}", file=sys.stderr, flush=True)

    def trained(self, report: object) -> None: ...

    def durable(self, steps: int) -> None: ...

    def refused(self, error: Exception) -> None:
        raise error

    def set_state(self, state: str) -> None:
        print(state, file=sys.stderr, flush=True)

    def gauges(self, values: Mapping[str, float], *, in_status: bool = True) -> None: ...


def replayed(config: RunConfig, directory: Path, steps: list[int]) -> RunConfig:
    """Returns the run's config for training again in a directory of its own, from the beginning up to the last of ``steps``.

    Raises ConfigError for a run with a critic, and for batches that do not begin at step 0.
    """
    if config.algorithm.has_critic:
        raise ConfigError("algorithm.advantage_estimator", "ppo", "an estimator without a critic; its values are not in the dumps")
    missing = sorted(set(range(steps[-1] + 1)) - set(steps))
    if missing:
        raise ConfigError("load_debug_rollout_data", f"no file of step {missing[0]}", f"every step from 0 to {steps[-1]}")
    run = config.run.model_copy(update={"dir": directory.parent, "name": directory.name})
    rollout = config.rollout.model_copy(update={"num_rollout": len(steps)})
    monitoring = config.monitoring.model_copy(update={"save_debug_rollout_data": None})
    return config.model_copy(update={"run": run, "rollout": rollout, "monitoring": monitoring})


def launch(arguments: list[str]) -> None:
    """Reads the config, empties the replay's directory, becomes the only rank or starts all of them."""
    from services.trainer.__main__ import prepare_environment, run_ranks
    from services.trainer.dumps import DumpedBatches

    if len(arguments) < 2 or arguments[0].startswith("-"):
        print(USAGE)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    path, template, *rest = arguments
    config = configs.load(Path(path), flags.parse(rest))
    config = hub_resolve.local(hub_resolve.pinned(config, hub_resolve.pins_in(config.run.root)), hub_resolve.MODELS)
    directory = config.run.root.with_name(f"{config.run.name}-replay")
    config = replayed(config, directory, DumpedBatches(template).steps)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    written = directory / "config.json"
    written.write_text(config.model_dump_json())
    os.environ |= {CONFIG_VARIABLE: str(written)}
    prepare_environment(config)
    ranks = config.trainer.ranks("actor")
    if ranks == 1:
        rank(template)
    else:
        run_ranks(ranks, "services.trainer.batch_replay", "rank", template)


def rank(template: str) -> None:
    """Trains on one rank."""
    import torch

    from services.trainer.dumps import DumpedBatches
    from services.trainer.loop import Trainer

    config = RunConfig.model_validate_json(Path(os.environ[CONFIG_VARIABLE]).read_text())
    torch.set_num_threads(config.trainer.torch_threads or 1)
    dumps = DumpedBatches(template)
    control: Any = ReplayClient(dumps) if int(os.environ.get("RANK", "0")) == 0 else None
    for step in dumps.steps if control is None else ():
        dumps.batch(step)  # the other ranks get a batch's references from rank 0, and read its payloads themselves
    trainer = Trainer(config, dumps, control)  # type: ignore[arg-type]
    try:
        trainer.run()
    finally:
        trainer.close()


if __name__ == "__main__":
    die_with_parent()
    given = sys.argv[1:]
    sys.exit(exit_code("replay", (lambda: rank(given[1])) if given[:1] == ["rank"] else (lambda: launch(given))))
