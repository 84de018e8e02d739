"""``python -m shared.runtime.healthcheck [HOST:PORT/PATH]``: exits 0 where the service of this container says that it is well, else 1.

Standard library alone, so that a probe costs little: containers run it every few seconds.
"""

import os
import sys
import urllib.error
import urllib.request

SECONDS = 5.0


def main() -> int:
    """Asks the address of the command line, else ``/healthz`` at that of ``MYXO_HTTP``. Returns the exit code."""
    host, _, port = os.environ.get("MYXO_HTTP", "").rpartition(":")
    own = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(host, host)
    if own == "private":
        from shared.runtime.addresses import own_address

        own = own_address()
    address = sys.argv[1] if len(sys.argv) > 1 else f"{own}:{port}/healthz"
    try:
        with urllib.request.urlopen(f"http://{address}", timeout=SECONDS) as answer:
            print(answer.read(500).decode(errors="replace"))
            return 0
    except urllib.error.HTTPError as error:
        print(f"{error.code}: {error.read(500).decode(errors='replace')}")
    except OSError as error:
        print(f"no reply from {address}: {error}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
