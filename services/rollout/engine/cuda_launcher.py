"""Starts SGLang's own HTTP server on a GPU, with its endpoints kept private.

    python cuda_launcher.py --model-path MODEL --device cuda ...    (sglang.launch_server's flags)

Its children are spawned: they import this file again, as ``__mp_main__``, and so keep their endpoints private, too.
"""

import runpy

from services.rollout.engine import private_endpoints

private_endpoints.apply()

if __name__ == "__main__":
    private_endpoints.leave_out_own_requests()
    runpy.run_module("sglang.launch_server", run_name="__main__")  # this file stays the main module that the children import
