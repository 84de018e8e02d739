"""A run's directory: where everything lies, who holds it, and which of it is the run's own state.

```
DIR/NAME/
  lock            held by the one command that runs servers here
  config.json     the run's config, as it is frozen on the bus, without credentials; config-private.json, for its owner alone, has them
  servers.json    addresses of the live run's servers, readable by its owner only; there while `myxo up` runs
  nats/ valkey/   what the embedded servers keep
  logs/           one file an instance; logs/older/ has what it held before it was rotated
  checkpoints/ critic-checkpoints/ tensorboard/ wandb-ROLE.jsonl reference/ weights/ hf/   the trainer's
  evaluations/    of `myxo eval`
  prompts/        which prompts are left out, what a custom data source has given
  rollouts/       the responses of groups that have ended (`shared.data.rollout_files`)
  clients/        checkpoints and weights of the clients of `myxo serve`
  summary.json reward.png         what `myxo summary` makes; trace.json.gz: `myxo trace`
```
Whatever else lies there is the user's and never touched.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, TextIO

from shared.bus import runs
from shared.bus.subjects import RUN_ID
from shared.config.run_config import RunConfig
from shared.data.data_files import paths
from shared.runtime.errors import ConfigError, MyxoError, nearest
from shared.runtime.safe_files import private_directory, replace_file
from shared.runtime.safe_text import say

# The names that `--fresh` removes.
STATE = (
    *("nats", "valkey", "logs", "checkpoints", "critic-checkpoints", "weights", "tensorboard", "wandb-actor.jsonl", "wandb-critic.jsonl"),
    *("reference", "hf", "profile", "prompts", "rollouts", "clients", "evaluations"),
    *(runs.FROZEN, runs.PRIVATE, "summary.json", "reward.png", "trace.json.gz", "servers.json"),
)

HOLD_SECONDS = 1.0  # time to try for the lock: a command that only checks whether it is held has it for an instant
READING = ", which reads the run"  # what the lock says of such a holder
LOG_BYTES, OLDER = 16 << 20, "older"  # of the log of an instance: with the older one it is at most about twice as much
SNAPSHOT = re.compile(r"v\d{6,}|\.bridges|\.current")  # what a trainer keeps of its snapshots (`shared.transfer.weight_checkpoint`)
_MARKS = ("lock", "nats", "logs", "rollouts", "servers.json")


class RunHeld(MyxoError):
    """Another command holds the run's directory."""


@dataclass(frozen=True)
class ServerUrls:
    """Addresses of a live run's servers, credentials included, and the process id of its launcher. ``console``: its address with its
    token, empty where it has none."""

    nats_url: str
    redis_url: str
    pid: int
    console: str = ""


class RunDirectory:
    """The files of one run. ``root``: its directory; need not exist yet. ``state``: the names in it that `--fresh` removes."""

    def __init__(self, root: Path, state: Sequence[str] = STATE) -> None:
        self.root, self.state = root, state
        self.nats, self.valkey, self.logs = root / "nats", root / "valkey", root / "logs"
        self.summary, self.chart = root / "summary.json", root / "reward.png"
        self._servers, self._lock = root / "servers.json", root / "lock"

    def log(self, instance: str) -> Path:
        """Returns the file that the standard output and error of an instance go to."""
        return self.logs / f"{instance}.log"

    @contextlib.contextmanager
    def open_log(self, instance: str) -> Iterator[TextIO]:
        """Opens that file to append to; what it has not taken at the end, for its disk is full, is lost without an error."""
        file = self.log(instance).open("a", buffering=1)
        try:
            yield file
        finally:
            with contextlib.suppress(OSError):
                file.close()

    def rotate_logs(self) -> None:
        """Moves what a log beyond `LOG_BYTES` holds to `OLDER`, over what was moved before; processes keep the log open and write on."""
        for path in self.logs.glob("*.log"):
            with contextlib.suppress(OSError):  # it is removed, or the disk is full
                if path.stat().st_size > LOG_BYTES:
                    (self.logs / OLDER).mkdir(exist_ok=True)
                    shutil.copyfile(path, self.logs / OLDER / path.name)
                    os.truncate(path, 0)

    def make(self, config: RunConfig) -> None:
        """Makes the directory, with the permissions that ``run.dir_mode`` says. Raises ConfigError."""
        with self._writable():
            private_directory(self.root, int(config.run.dir_mode, 8))

    @contextlib.contextmanager
    def _writable(self, what: str = "written") -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, PermissionError) and os.access(self._lock, os.R_OK) and self.is_held():
                raise RunHeld(f"{self.root} is of another user's live run: reach it as that user, or by NATS_URL with an account") from None
            raise ConfigError("run.dir", str(self.root), f"cannot be {what}: {error.strerror}; give another run.dir") from None

    # --- the lock

    @contextlib.contextmanager
    def held(self, purpose: str = "") -> Iterator[None]:
        """Holds the directory for this process as long as the body runs, or until the process ends. Raises RunHeld, ConfigError.
        ``purpose``: `READING` where the run is served at rest.

        The lock file stays: removing it would let two holders in.
        """
        with self._writable():
            self.root.mkdir(parents=True, exist_ok=True)
            file = self._lock.open("a+")
        with file:
            end = time.monotonic() + HOLD_SECONDS
            with self._writable("locked"):
                while not _locked(file, fcntl.LOCK_EX):
                    if time.monotonic() > end:
                        file.seek(0)
                        holder = file.read().strip() or "another process"
                        raise RunHeld(f"run directory {self.root} is in use by {holder}; stop that first, or give another run.name")
                    time.sleep(0.05)
            with contextlib.suppress(OSError):  # on a full disk it is held without the name of its holder
                os.ftruncate(file.fileno(), 0)
                os.write(file.fileno(), f"process {os.getpid()}{purpose}".encode())  # nothing is left to be written when it is closed
            try:
                yield
            finally:
                os.ftruncate(file.fileno(), 0)

    def is_held(self) -> bool:
        """Returns whether another process holds the directory now."""
        try:
            with self._lock.open() as file:  # which who may only read the run's files may, too
                return not _locked(file, fcntl.LOCK_SH)
        except OSError:  # there is none, it is another user's, or a file system without locks
            return False

    def at_rest_without_streams(self) -> bool:
        """Returns whether nothing but files is left of the run here: no streams on disk, and no process that serves some to this user."""
        return self.servers() is None and not (self.nats / "jetstream").is_dir()

    # --- state

    def refuse_input_in_state(self, config: RunConfig) -> None:
        """Refuses to clear a directory that holds the run's own input. Raises ConfigError naming the field."""
        for section in type(config).model_fields:
            for field, value in getattr(config, section):
                for path in [] if field in ("dir", "update_weight_disk_dir") else paths(value):
                    for name in self.state:
                        state = self.root / name
                        if path.resolve().is_relative_to(state.resolve()):
                            raise ConfigError(f"{section}.{field}", str(path), f"lies in {state}, which --fresh removes; move it first")

    def clear(self) -> None:
        """Removes the run's state, nothing else. Symbolic links are unlinked, never followed."""
        for name in self.state:
            path = self.root / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def placed(self, config: RunConfig, *, quiet: bool = False) -> RunConfig:
        """Returns the config of the run whose files lie here with their places, and says so where it names others, as a copy's does. Raises
        ConfigError for that of a run of another name."""
        there, here = config.run.root.resolve(), self.root.absolute()  # which may be a link of the run's name
        if there == here.resolve():
            return config
        if config.run.name != here.name:
            raise ConfigError("RUN", str(self.root), runs.files_of_another(self.root, config))
        if not quiet:
            say(f"{self.root} is a copy of {config.run.root}, which its config names; `myxo move` takes a run to another directory")
        saved = {"save": here.parent} if config.trainer.save is not None and config.trained.resolve() == there else {}
        return config.with_fields(run={"dir": here.parent}, trainer=saved)

    def without_streams(self, run: str, config: RunConfig | None) -> str:
        """Returns why a bus may have nothing of a run whose directory this is: it is a copy of another one's, or the bus has lost its data.
        Empty where there is nothing to lose."""
        config = runs.frozen(self.root) or config
        if config is not None and config.run.name != run:
            return runs.files_of_another(self.root, config)
        kept = config.trained / "checkpoints" if config is not None else self.root / "checkpoints"
        steps = max((step for step, _ in complete_checkpoints(kept)), default=0)
        if not steps:
            return ""
        lost = f"{kept} holds a checkpoint of {steps} steps, and the bus holds nothing of run {run}"
        lost += ": NATS's data are lost, or it is another NATS; put them back, or begin another run with its weights (`myxo convert`)"
        return f"{lost}, or this one anew (`myxo up --fresh`; for `myxo submit`, with its directory moved away)"

    def write_servers(self, servers: ServerUrls) -> None:
        """Writes the addresses of the live run's servers, readable by this user only."""
        replace_file(self._servers, json.dumps(asdict(servers)).encode(), mode=0o600)

    def remove_servers(self) -> None:
        self._servers.unlink(missing_ok=True)

    def servers(self) -> ServerUrls | None:
        """Returns the live run's servers; None where no launcher holds the directory (what a killed one left behind means nothing)."""
        with contextlib.suppress(OSError, ValueError, TypeError):  # they are for the owner alone
            return ServerUrls(**json.loads(self._servers.read_text())) if self.is_held() else None
        return None


CHECKPOINTS = {"actor": "checkpoints", "critic": "critic-checkpoints"}  # where the trainer's roles keep theirs, in the run's directory
MARKER = "checkpoint.json"  # What a complete checkpoint has (`services.trainer.parallel.checkpoint`)
_STEP = re.compile(r"step_(\d{8,})")


def checkpoints(config: RunConfig) -> list[int]:
    """Returns the steps of the complete checkpoints that all of the trainer's roles have on this machine, oldest first."""
    roots = [config.trained / CHECKPOINTS[role] for role in (CHECKPOINTS if config.algorithm.has_critic else ("actor",))]
    return sorted(set.intersection(*({step for step, _ in complete_checkpoints(root)} for root in roots)))


def complete_checkpoints(root: Path) -> Iterator[tuple[int, Path]]:
    """Yields the steps and the path of each complete checkpoint in a directory, oldest first."""
    for path in sorted(root.iterdir()) if os.path.isdir(root) else ():  # another user's may not be asked
        if (named := _STEP.fullmatch(path.name)) and (path / MARKER).is_file():
            yield int(named[1]), path


def find(run: str, directory: Path) -> tuple[str, RunDirectory | None]:
    """Returns (run id, its directory) for what a person typed: an id below ``directory``, or a run directory's path.

    The directory is None where there is none on this machine, which is fine for a run on a given NATS server.
    Raises ConfigError for text that is neither.
    """
    path = Path(run)
    if RUN_ID.match(run):
        there = next(filter(_is_run, (directory / run, path)), None)
        return run, RunDirectory(there.absolute()) if there else None
    name = path.resolve().name
    if not RUN_ID.match(name):
        raise ConfigError("RUN", run, "expected a run's id (lower-case letters, digits, '-' and '_') or its directory")
    return name, RunDirectory(path.resolve()) if _is_run(path) else None


def no_such_run(run: str, directory: Path) -> ConfigError:
    """Returns the refusal of a run that is not there, with the nearest one that is."""
    known = sorted(path.name for path in directory.iterdir() if _is_run(path)) if directory.is_dir() else []
    hint = nearest(run, known) if known else "there are none yet; `myxo up CONFIG` makes one"
    return ConfigError("RUN", run, f"no such run in {directory}/; {hint}")


def _locked(file: IO[str], kind: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def _is_run(path: Path) -> bool:
    return any(os.path.exists(path / mark) for mark in _MARKS) or runs.frozen(path) is not None  # neither where it is another user's
