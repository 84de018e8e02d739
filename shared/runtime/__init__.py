"""The ground floor of every process: errors, tasks, files, addresses, text, logs and metrics. It imports no other package of shared.

Entry points import `quick_imports` first, from here, so that nothing else of it is imported before the collector is held back.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Holds garbage collection back while a process imports what it is made of, and leaves that out of later collections.

    Modules make hundreds of thousands of objects, all of which stay; looking through them again and again is up to a third of the time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
