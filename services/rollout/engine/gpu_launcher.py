"""Starts SGLang's own HTTP server on GPUs: ``sglang.launch_server``, but that its ranks' store listens on loopback alone.

    PYTHONPATH=MYXO python gpu_launcher.py --model-path MODEL ...    (sglang.launch_server's flags)

The store is where an engine's schedulers meet (`shared.transfer.bound_store`); they trust what they find there, and unpickle what they then
send to each other. They are spawned, and a child that is spawned imports this file again, as ``__mp_main__``.
"""

import runpy

from shared.transfer.bound_store import bind_stores

bind_stores()

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
