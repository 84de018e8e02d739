"""``python -m services.trainer.batch_replay CONFIG TEMPLATE [flags]``: trains the batches that a run has dumped, without bus, store and
engines.

Started by ``myxo replay``; with ``--train-only`` and the checked config as JSON by ``myxo up`` for a run with `load_debug_rollout_data`,
which continues from its checkpoints. Every rank runs it; the launcher starts as many as the config asks for. Everything else is
the trainer's own code: the same batches under the same config give the same steps, and with ``--deterministic`` the same bits.
"""

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shared.bus import runs
from shared.config import config_reading, flags
from shared.config.config_layers import over
from shared.config.run_config import RunConfig
from shared.config.service_sections import DUMPS
from shared.hub import hub_resolve
from shared.process.child_process import die_with_parent
from shared.runtime.errors import ConfigError
from shared.runtime.safe_files import replace_file
from shared.runtime.traces import Traces
from shared.schema.messages import BatchAnswer, EvalFigures, RunDone, Trained
from shared.schema.service_messages import WarmStartEnded
from shared.service.service_base import Look, exit_code

USAGE = """usage: myxo replay CONFIG TEMPLATE [flags]

Trains the batches again that a run has written with --save-debug-rollout-data TEMPLATE, without bus, store and engines. CONFIG is the
run's file, or its directory, which keeps the config that it ran with. Each step's metrics are a line of JSON on standard output;
checkpoints, TensorBoard's files and the final weights lie in the run's directory with -replay behind its name. Flags are
laid over the config as by `myxo up`, --deterministic among them."""

CONFIG_VARIABLE = "MYXO_REPLAY_CONFIG"  # the environment variable with the path of the config that the launcher has written for its ranks
TRAIN_ONLY = "--train-only"  # the first word where the config is that of a run, checked, and not of a replay

OTHERS: dict[str, dict[str, Any]] = {
    "trainer": {"save": None, "save_hf": None},
    "debug": dict.fromkeys(["save_debug_rollout_data", "save_debug_train_data", "dump_details", "memory_snapshot_dir"]),
    "monitoring": {"use_wandb": False, "wandb_dir": None},
}
"""What a run writes besides its directory, as it stands in a replay that has no such flag of its own."""


class ReplayClient:
    """A stand-in for rank 0's `ControlClient`: batches come from files, and reports are printed.

    Args:
        dumps: a `DumpedBatches`. steps: of the run. After SIGTERM or SIGINT it asks the trainer to stop, as a service does.
    """

    replicas: list[Any] = []
    evaluations: list[EvalFigures] = []
    traces = Traces()

    def __init__(self, dumps: Any, steps: int) -> None:
        self._dumps, self._steps, self.stopping = dumps, steps, False
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._stop)

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def batch(self, step: int, version: int, hold: bool = True) -> BatchAnswer:
        """Returns the batch of ``step``, or the answer that there are no more."""
        return self._dumps.batch(step) if step < self._steps else RunDone()

    def report(self, what: str, message: Trained | WarmStartEnded) -> None:
        """Prints a step as one line of JSON."""
        if isinstance(message, Trained):
            print(json.dumps({"step": message.step, "version": message.version, **message.metrics}), flush=True)

    def live_version(self) -> int:
        """Returns -1: no version is announced."""
        return -1

    def publish_event(self, what: str, detail: str) -> None:
        print(f"{what}: {detail}", file=sys.stderr, flush=True)

    def trained(self, report: object) -> None: ...

    def durable(self, steps: int) -> None: ...

    def refused(self, error: Exception) -> None:
        raise error

    def set_state(self, state: str) -> None:
        print(state, file=sys.stderr, flush=True)

    def report_activity(self, what: str, awaited_from: Sequence[str] = (), next_action: str = "") -> None: ...

    def watch_activity(self, look: Look) -> None: ...

    def gauges(self, values: Mapping[str, float], *, in_status: bool = True) -> None:
        """Prints a step of the warm start, or of demonstrations alone, as one line of JSON."""
        if "sft_step" in values:
            print(json.dumps(dict(values)), flush=True)


def replayed(config: RunConfig, template: str, steps: list[int]) -> RunConfig:
    """Returns the run's config for training its batches again in a directory of their own, from the beginning up to the last of ``steps``.

    The learning rate decays over the run's steps, however many of them are trained again. Raises ConfigError for batches that do not begin
    at step 0, and where it is not known over how many the rate decays.
    """
    rollout, trainer = config.rollout, config.trainer
    if not rollout.num_rollout and trainer.decays_over_the_run:
        raise ConfigError(
            "rollout.num_rollout", rollout.num_rollout, "the run's steps, or its directory as CONFIG: by them the rate decays"
        )
    missing = sorted(set(range(steps[-1] + 1)) - set(steps))
    if missing:
        raise ConfigError(DUMPS, f"no file of step {missing[0]}", f"every step from 0 to {steps[-1]}")
    directory, updates = config.run.root.with_name(f"{config.run.name}-replay"), rollout.num_rollout * trainer.num_steps_per_rollout
    return config.with_fields(
        run={"dir": directory.parent, "name": directory.name},
        rollout={"num_rollout": len(steps)},
        trainer={"lr_decay_iters": trainer.decay_steps(updates) or None},
        debug={"debug_rollout_only": False, "load_debug_rollout_data": template},
    )


def offline(config: RunConfig) -> RunConfig:
    """Returns the config of a trainer from which no engine takes weights. Raises ConfigError for one with a critic."""
    if config.algorithm.has_critic:
        raise ConfigError("algorithm.advantage_estimator", "ppo", "an estimator without a critic; its values are not in the dumps")
    unused = {"update_weight_transport": "nccl", "object_store_url": None, "snapshot_interval": 0, "join_from": "trainer"}
    return config_reading.with_own_gpus(config.with_fields(weights=unused))


def launch(arguments: list[str]) -> None:
    """Reads the config, becomes the only rank or starts all of them. A replay's directory is emptied first."""
    from services.trainer.__main__ import become_ranks, prepare_environment

    if len(arguments) < 2 or (arguments[0].startswith("-") and arguments[0] != TRAIN_ONLY):
        print(USAGE)
        sys.exit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    given = RunConfig.model_validate_json(Path(arguments[1]).read_text()) if arguments[0] == TRAIN_ONLY else None
    config = offline(_replay(arguments) if given is None else hub_resolve.local(given, hub_resolve.MODELS))
    written = config.run.root / "logs" / "train-config.json"
    written.parent.mkdir(parents=True, exist_ok=True)
    replace_file(written, config.model_dump_json().encode(), mode=0o600)
    os.environ |= {CONFIG_VARIABLE: str(written)}
    prepare_environment(config)
    become_ranks(config.trainer.ranks("actor"), "services.trainer.batch_replay", "rank")


def _replay(arguments: list[str]) -> RunConfig:
    from services.trainer.dumps import dumped_steps

    path, template, *rest = arguments
    config = replay_config(Path(path), flags.parse(rest))
    config = hub_resolve.local(hub_resolve.pinned(config, hub_resolve.pins_in(config.run.root)), hub_resolve.MODELS)
    config = replayed(config, template, dumped_steps(template))
    shutil.rmtree(config.run.root, ignore_errors=True)
    return config


def replay_config(path: Path, given: dict[str, dict[str, Any]]) -> RunConfig:
    """Returns the config of a file, or the one that a run's directory keeps, with flags over it. It writes nowhere but in its directory
    unless a flag says so. Raises ConfigError, or Problems."""
    if save := given.get("trainer", {}).get("save"):
        raise ConfigError("--save", save, "none: each replay begins anew, and keeps its checkpoints in its directory")
    if not path.is_dir():
        config = config_reading.load(path, given)
    elif (frozen := runs.frozen(path)) is not None:
        config = config_reading.parse(over(frozen.model_dump(mode="json", exclude_unset=True), given))
    else:
        raise ConfigError("CONFIG", str(path), f"a config, or a run's directory with its {runs.FROZEN}")
    for section, fields in OTHERS.items():
        config = config.with_fields(**{section: {name: fields[name] for name in fields.keys() - given.get(section, {}).keys()}})
    return config


def rank() -> None:
    """Trains on one rank."""
    import torch

    from services.trainer.dumps import DumpedBatches
    from services.trainer.loop import Trainer

    config = RunConfig.model_validate_json(Path(os.environ[CONFIG_VARIABLE]).read_text())
    torch.set_num_threads(config.trainer.torch_threads or 1)
    dumps = DumpedBatches(config)
    first = int(os.environ.get("RANK", "0")) == 0
    control: Any = ReplayClient(dumps, config.rollout.num_rollout) if first else None
    if not first:  # rank 0 gets the signal and commands all ranks to leave
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_IGN)
    trainer = Trainer(config, dumps, control)  # type: ignore[arg-type]
    try:
        trainer.run()
    finally:
        trainer.close()


if __name__ == "__main__":
    die_with_parent()
    given = sys.argv[1:]
    sys.exit(exit_code("replay", rank if given[:1] == ["rank"] else (lambda: launch(given))))
