"""Starts SGLang's own HTTP server on GPUs: it listens on a private socket, its ranks' store on loopback alone, its sockets let no one in.

    PYTHONPATH=MYXO python gpu_launcher.py --model-path MODEL ...    (sglang.launch_server's flags)

The store is where an engine's schedulers meet (`shared.transfer.channel_store`); they trust what they find there, and unpickle what they
then send to each other. They are spawned, and a spawned child imports this file again, as ``__mp_main__``. They are begun at once, so
that they import SGLang beside this process, not after it (`services.rollout.engine.early_processes`), and so is the compiling of what the
engine would compile once it has imported (`services.rollout.engine.kernel_builds`).
"""

import runpy
import sys
from pathlib import Path

from services.rollout.engine.early_processes import EXPECTED_VARIABLES, LATE_VARIABLES, EarlyProcesses, early_modules
from services.rollout.engine.kernel_builds import begin_kernel_builds
from shared.model.quantization import entry_format
from shared.runtime import quick_imports

if __name__ == "__main__":
    begin_kernel_builds(sys.argv[1:])
    early_processes = EarlyProcesses(early_modules(sys.argv[1:]), EXPECTED_VARIABLES, LATE_VARIABLES)

with quick_imports():
    from services.rollout.engine.private_endpoints import close_sockets, leave_out_own_requests, serve_on_socket
    from shared.transfer.channel_store import bind_stores

serve_on_socket()
bind_stores()
close_sockets()
sys.modules["megatron"] = None  # type: ignore[assignment]  # SGLang's debug dumper imports it where it is installed, seconds for nothing
model = sys.argv[sys.argv.index("--model-path") + 1] if "--model-path" in sys.argv[:-1] else ""
if (form := entry_format(Path(model))) is not None and form.bits == 4:
    from services.rollout.engine import quantized_layers

    quantized_layers.install(model, on_cpu=False)
if "--enable-lora" in sys.argv:
    with quick_imports():
        from services.rollout.engine import sglang_changes

        sglang_changes.shorten_adapter_segments()

if __name__ == "__main__":
    with quick_imports():
        from sglang.srt.entrypoints import http_server

        from services.rollout.engine import sglang_changes

    early_processes.note_imported()
    leave_out_own_requests(http_server)
    sglang_changes.read_media(model)
    runpy.run_module("sglang.launch_server", run_name="__main__")
elif "--tokenizer-worker-num" in sys.argv:  # servers that are spawned beside one another read prompts themselves
    from services.rollout.engine import sglang_changes

    sglang_changes.read_media(model)
