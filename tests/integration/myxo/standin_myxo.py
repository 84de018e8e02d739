"""``myxo`` with the stand-ins in the places of rollout and trainer; everything else is the real thing."""

import sys

from myxo.launch.service_plan import SERVICE_MODULES
from myxo.main import main

SERVICE_MODULES["rollout"] = "tests.integration.myxo.standin_rollout"
SERVICE_MODULES["trainer"] = "tests.integration.myxo.standin_trainer"

if __name__ == "__main__":
    sys.exit(main())
