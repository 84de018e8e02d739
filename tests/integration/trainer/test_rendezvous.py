"""Several ranks of a trainer meet through torchrun, and nobody else gets in by the port at which they do."""

import base64
import contextlib
import datetime
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from tests.support.listening_sockets import listening_sockets
from tests.support.waiting import wait_until

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 180.0

SLEEPER = ("timeit", "-n", "1", "-r", "1", "import time; time.sleep(600)")
STANDALONE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", *SLEEPER)
OURS = ("-c", f"from services.trainer.torchrun import run_ranks; run_ranks(2, *{SLEEPER!r})")


class Touch:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


@contextlib.contextmanager
def launched(*words: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


def poison(port: int, marker: Path) -> int:
    """Writes a pickle over every value of a store, as anybody can who reaches its port. Returns how many there were."""
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=datetime.timedelta(seconds=5), wait_for_workers=False)
    keys = store.list_keys()
    for key in keys:
        with contextlib.suppress(DistStoreError):
            store.set(key, base64.b64encode(pickle.dumps(Touch(marker))))
    return len(keys)


@pytest.mark.timeout(2 * SECONDS + 120)
def test_a_pickle_written_to_the_ranks_rendezvous_is_never_loaded(tmp_path: Path) -> None:
    """torchrun's own way, under the same attack, shows that the attack is one. Two trainers of a machine have a port each."""
    executed, ours = tmp_path / "standalone", tmp_path / "ours"
    with launched(*STANDALONE) as standalone, launched(*OURS) as trainer, launched(*OURS) as another:
        for process in (standalone, trainer, another):
            wait_until(lambda process=process: listening_sockets(process.pid), "a rendezvous", SECONDS)

        def attacked() -> bool:
            for found in listening_sockets(trainer.pid):
                poison(found.port, ours)
            with contextlib.suppress(DistNetworkError):  # it dies of what it has loaded
                for found in listening_sockets(standalone.pid):
                    poison(found.port, executed)
            return executed.exists()

        wait_until(attacked, "the execution of what was written to torchrun --standalone", SECONDS, pause=0.1)
        assert not ours.exists()
        assert trainer.poll() is None, "the trainer's ranks did not survive it"
        opened = [listening_sockets(process.pid) for process in (trainer, another)]
        assert all(opened) and {found.address for sockets in opened for found in sockets} == {"127.0.0.1"}
        assert not {found.port for found in opened[0]} & {found.port for found in opened[1]}
