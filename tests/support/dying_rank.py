"""A trainer's rank whose thread dies, or one that is busy and hears no signal: run by torchrun. With the word ``stops`` a signal stops
rank 1 instead."""

import os
import signal
import sys
import time

from services.trainer.rank import kill_siblings
from shared.runtime import tasks
from shared.service.service_base import exit_code


def main() -> None:
    tasks.arm(before_exit=kill_siblings)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "1":
        if "stops" in sys.argv:
            print("dying", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(2)  # for the other one to have begun

        def dies() -> None:
            print("dying", flush=True)
            raise KeyError("what it died of")

        tasks.SupervisedThread(dies, "worker").start()
    time.sleep(600)


if __name__ == "__main__":
    sys.exit(exit_code("trainer", main))
