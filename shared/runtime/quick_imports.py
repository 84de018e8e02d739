"""Imports that the garbage collector does not look through; it imports nothing itself, since entry points import it first."""

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
