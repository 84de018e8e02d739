"""One real service process of a run: ``python -m services.<name>``."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from shared.process.child_process import with_parent
from tests.support.fork_server import ForkServerPopen

ROOT = Path(__file__).resolve().parents[2]


class ServiceProcess:
    """Starts at once; use as a context manager, and it is killed at the end of the body.

    Args:
        name: the service. log: where its output goes (appended). environment: on top of this process's.
        popen: what starts it; ``subprocess.Popen`` does so as an operator does, which takes seconds of CPU.
    """

    def __init__(
        self, name: str, log: Path, environment: Mapping[str, str], popen: type[subprocess.Popen[bytes]] = ForkServerPopen
    ) -> None:
        self.name, self.log = name, log
        with log.open("ab") as output:
            self.process = popen(
                with_parent([sys.executable, "-m", f"services.{name}"]),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.process.kill()
        self.process.wait(30)

    def stop(self, deadline: float = 30.0) -> int:
        """SIGTERM; returns the exit code. Raises subprocess.TimeoutExpired after ``deadline`` seconds."""
        self.process.terminate()
        return self.process.wait(deadline)

    def words(self) -> str:
        """Everything it has written so far."""
        return self.log.read_text(errors="replace")

    def __enter__(self) -> "ServiceProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


def processes() -> dict[int, tuple[int, str]]:
    """This machine's processes that are alive, in the order of their pids: pid → its parent's, and its command line."""
    found = {}
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state != "Z":
                found[pid] = (int(parent), words)
    return found
