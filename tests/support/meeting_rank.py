"""A rank that meets the others through torchrun's store, and then sleeps, or leaves in order once rank 0 is asked to: no training."""

import os
import signal
import sys
import time
from datetime import timedelta

SECONDS = timedelta(seconds=120)


def main() -> None:
    from torch.distributed import TCPStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, SECONDS)
    asked: list[int] = []
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    else:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    store.set(f"rank {rank}", "here")
    store.wait([f"rank {other}" for other in range(size)], SECONDS)
    print(f"met {rank} of {size} by {os.environ['GLOO_SOCKET_IFNAME']}", flush=True)
    while True:
        if asked:
            store.set("leave", "now")
        if store.check(["leave"]):
            store.set(f"left {rank}", "now")
            store.wait([f"left {other}" for other in range(size)], SECONDS)
            sys.exit(0)
        time.sleep(0.1)


if __name__ == "__main__":
    main()
