"""``myxo`` whose processes are forked, with the scripted trainer and engine; launcher, services and servers are production's.

The picture of the report alone is not drawn: it would take a tenth of a seed's time.
"""

import os
import sys
from pathlib import Path

from myxo.display import reward_chart
from myxo.launch import run_servers
from myxo.launch.service_plan import SERVICE_MODULES
from myxo.main import main
from services.rollout.engine.engine_process import CPU_LAUNCHER
from tests.chaos.fast import preload
from tests.chaos.fast.proxied_servers import proxied
from tests.chaos.link_proxy import ADDRESSES, ProxiedAddresses
from tests.support import forking

MODULES = {"trainer": "tests.chaos.fast.scripted_trainer"}
PLACES = {str(CPU_LAUNCHER): "tests.chaos.fast.scripted_engine"}

if __name__ == "__main__":
    assert preload.MODULES
    forking.settle()
    register = Path(os.environ["MYXO_CHAOS_PROCESSES"])
    forking.install(register, PLACES)
    SERVICE_MODULES.update(MODULES)
    reward_chart.draw = lambda *_: None
    run_servers.EmbeddedNats, run_servers.EmbeddedValkey = proxied(ProxiedAddresses.from_text(os.environ[ADDRESSES]))
    sys.exit(main())
