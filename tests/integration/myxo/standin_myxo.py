"""``myxo`` with the stand-ins in the places of rollout and trainer; everything else is the real thing."""

import sys

from myxo.launch.service_plan import SERVICE_MODULES
from myxo.main import main
from tests.integration.myxo.command import STANDINS

SERVICE_MODULES.update(STANDINS)

if __name__ == "__main__":
    sys.exit(main())
