"""What an engine on a CPU imports, held by a server that `tests.support.fork_server` forks engines from; as a program, such an engine."""

import os
import sys

import setproctitle
from prometheus_client import values

from services.rollout.engine.engine_process import COMMON_VARIABLES, CPU_VARIABLES, engine_site
from services.rollout.engine.private_endpoints import close_sockets, serve_on_socket
from shared.process.child_process import die_with_parent
from shared.runtime import quick_imports

setproctitle.getproctitle()  # it looks for the command line's place by the environment, which must not have changed yet
os.environ |= COMMON_VARIABLES | CPU_VARIABLES  # some are read while modules are imported
sys.path.insert(0, str(engine_site()))

with quick_imports():
    import tests.support.fork_server
    from services.rollout.engine import cpu_launcher

with quick_imports():  # behind its stand-ins
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.model_executor.model_runner
    import sglang.srt.models.registry

MODULES = (tests, sglang)
"""What is held."""

if __name__ == "__main__":
    values.ValueClass = values.MultiProcessValue()  # chosen as it is imported: by a directory that the engine sets before
    die_with_parent()
    serve_on_socket()
    close_sockets()
    cpu_launcher.main()
