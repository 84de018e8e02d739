"""``python -m services.console``: serves the console of the run named by MYXO_RUN."""

import asyncio
import sys

from services.console.console_service import serve
from shared.runtime.service_base import exit_code

if __name__ == "__main__":
    sys.exit(exit_code("console", lambda: asyncio.run(serve())))
