"""A worker with a verifier that misbehaves as its response says; else it scores as exact match does."""

import os
import signal
import sys
import time

from services.reward import worker
from shared.rewards.reference import Reference
from shared.rewards.verifiers import VERIFIERS, exact


def odd(response: str, reference: Reference) -> float:
    match response:
        case "sleep":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "deaf":  # as C code that never looks for signals
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
            time.sleep(3600)
        case "memory":
            return float(len(bytes(1 << 40)))
        case "deep":
            return odd(response, reference)
        case "die":
            os._exit(3)
        case "raise":
            raise RuntimeError("cannot read this")
        case "chatter":
            print("words of a library", flush=True)
            os.write(1, b"words from C\n")
        case "babble":
            os.write(int(os.environ["ODD_ANSWERS"]), b"not JSON\n")
        case "nan" | "inf" | "-inf":
            return float(response)
    return exact(response, reference)


def main() -> None:
    VERIFIERS["odd"] = odd
    # the worker's own way out is the first free descriptor
    os.environ["ODD_ANSWERS"] = str(os.dup(1))
    os.close(int(os.environ["ODD_ANSWERS"]))
    worker.main()


if __name__ == "__main__":
    sys.exit(main())
