"""``myxo`` with the stand-ins in the places of rollout and trainer; everything else is the real thing."""

from __future__ import annotations

import sys

from shared.cli.main import main
from shared.cli.plan import SERVICE_MODULES

SERVICE_MODULES["rollout"] = "tests.integration.cli.standin_rollout"
SERVICE_MODULES["trainer"] = "tests.integration.cli.standin_trainer"

if __name__ == "__main__":
    sys.exit(main())
