"""``python -m services.console``: serves the console of the run named by MYXO_RUN. With ``address`` it prints where, token included."""

import asyncio
import sys

from shared.runtime import quick_imports

with quick_imports():
    from services.console.console_app import print_address, serve
    from shared.service.service_base import exit_code

if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["address"]):
        sys.exit("console: python -m services.console [address]")
    work = print_address if sys.argv[1:] else lambda: asyncio.run(serve())
    sys.exit(exit_code("console", work))
