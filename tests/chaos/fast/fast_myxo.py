"""``myxo`` whose processes are forked, with the scripted trainer and engine; launcher, services and servers are production's."""

import os
import sys
from pathlib import Path

from myxo.launch.service_plan import SERVICE_MODULES
from myxo.main import main
from tests.chaos.fast import forking

MODULES = {"trainer": "tests.chaos.fast.scripted_trainer"}

if __name__ == "__main__":
    register = Path(os.environ["MYXO_CHAOS_PROCESSES"])
    forking.install(register)
    SERVICE_MODULES.update(MODULES)
    sys.exit(main())
