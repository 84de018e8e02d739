"""A run that trains on dumps alone (`load_debug_rollout_data`): the trainer's ranks and nothing beside them."""

import signal
import subprocess
import sys

from rich.console import Console

from myxo.run.run_directory import RunDirectory
from shared.config.run_config import RunConfig
from shared.process.child_process import die_with_parent
from shared.runtime import exit_codes

MODULE = "services.trainer.batch_replay"

SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""The signals at which the trainer saves and ends."""


def run(config: RunConfig, directory: RunDirectory, console: Console, *, fresh: bool) -> int:
    """Trains the dumps from the newest checkpoint on, to the last step; each step's metrics are a line of JSON on standard output.

    SIGINT and SIGTERM have it save and end. Returns the exit code. Raises ConfigError where input lies in what ``fresh`` removes.
    """
    trained = RunDirectory(config.trained)
    if fresh:
        directory.refuse_input_in_state(config)
        trained.refuse_input_in_state(config)
    directory.make(config)
    with directory.held():
        if fresh:
            directory.clear()
            trained.clear()
        path = directory.freeze(config)
        command = [sys.executable, "-m", MODULE, "--train-only", str(path)]
        process = subprocess.Popen(command, preexec_fn=die_with_parent, start_new_session=True)
        got: list[int] = []

        def hand_on(signum: int, _: object) -> None:
            got.append(signum)
            process.send_signal(signum)

        previous = [signal.signal(signum, hand_on) for signum in SIGNALS]
        try:
            code = process.wait()
        finally:
            for signum, handler in zip(SIGNALS, previous, strict=True):
                signal.signal(signum, handler)
    if code != exit_codes.DONE:
        return code if code >= 0 else 128 - code
    if got:
        name = signal.Signals(got[0]).name
        console.print(f"Stopped by {name}. `myxo up` with the same config goes on from the last checkpoint.", soft_wrap=True)
        return 128 + got[0]
    what = "demonstrations" if config.debug.load_debug_rollout_data is None else "dumps"
    console.print(f"Run {config.run.name} has trained its {what}; what it made lies in {config.trained}.", soft_wrap=True)
    return exit_codes.DONE
