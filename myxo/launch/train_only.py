"""A run that trains on dumps alone (`load_debug_rollout_data`): the trainer's ranks and nothing beside them."""

import signal
import subprocess
import sys

from rich.console import Console

from myxo.run.run_directory import RunDirectory
from shared.config.run_config import RunConfig
from shared.runtime import exit_codes
from shared.runtime.child_process import die_with_parent

MODULE = "services.trainer.batch_replay"


def run(config: RunConfig, directory: RunDirectory, console: Console, *, fresh: bool) -> int:
    """Trains the dumps from the newest checkpoint on, to the last step; each step's metrics are a line of JSON on standard output.

    SIGINT and SIGTERM have it save and end. Returns the exit code. Raises ConfigError where input lies in what ``fresh`` removes.
    """
    name, trained = config.run.name, RunDirectory(config.trained)
    if fresh:
        directory.refuse_input_in_state(config)
        trained.refuse_input_in_state(config)
    with directory.held():
        if fresh:
            directory.clear()
            trained.clear()
        path = directory.freeze(config)
        command = [sys.executable, "-m", MODULE, "--train-only", str(path)]
        process = subprocess.Popen(command, preexec_fn=die_with_parent, start_new_session=True)
        signals = (signal.SIGINT, signal.SIGTERM)
        previous = [signal.signal(signum, lambda given, _: process.send_signal(given)) for signum in signals]
        try:
            code = process.wait()
        finally:
            for signum, handler in zip(signals, previous, strict=True):
                signal.signal(signum, handler)
    if code == exit_codes.DONE:
        what = "dumps" if config.has_steps else "demonstrations"
        console.print(f"Run {name} has trained its {what}; checkpoints, curves and weights lie in {config.trained}.", soft_wrap=True)
    return code if code >= 0 else 128 - code
