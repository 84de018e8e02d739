"""What the processes import that `tests.support.fork_server` starts: services, their workers and `myxo`, and no torch."""

import gc
import os

import setproctitle

from shared.runtime import quick_imports

setproctitle.getproctitle()  # it looks for the command line's place by the environment, which must not have changed yet
os.environ.setdefault("OMP_NUM_THREADS", "1")

with quick_imports():
    import numpy.ma
    import tensorboard.summary
    import uvicorn.lifespan.off
    import uvicorn.protocols.http.auto

    import myxo.commands.up
    import myxo.launch.launcher
    import myxo.main
    import services.buffer.buffer_service
    import services.console.console_app
    import services.console.run_source
    import services.gateway.gateway_service
    import services.reward.reward_service
    import services.reward.worker
    import services.rollout.function_worker
    import services.rollout.producer_process
    import services.rollout.rollout_service
    import shared.hooks
    import shared.rewards.math_verify
    import tests.support.fork_server

MODULES = (numpy.ma, tensorboard.summary, uvicorn, myxo, services, shared, tests)
"""What is held."""

for response in ("18", "x", "Q7e#2", r"\boxed{18}"):  # a parser's tables are made as it reads
    shared.rewards.math_verify.math_verify(response, "18")
setproctitle.getproctitle()  # it looks for the command line, which must still be where it was
gc.collect()
gc.freeze()
