"""``myxo`` with the poisonous rollout service and the stand-in trainer; buffer, reward, NATS and Valkey are the real things."""

import sys

from myxo.launch.service_plan import SERVICE_MODULES
from myxo.main import main
from tests.integration.myxo.command import STANDINS

SERVICE_MODULES.update({**STANDINS, "rollout": "tests.chaos.poisonous_rollout"})

if __name__ == "__main__":
    sys.exit(main())
