"""What tests import, and the tests themselves, held by a server that `tests.support.fork_server` forks xdist's workers from."""

import gc
import importlib
import os
from pathlib import Path

import setproctitle
from _pytest.config import _prepareconfig

from shared.runtime.quick_imports import quick_imports

setproctitle.getproctitle()  # it looks for the command line's place by the environment, which must not have changed yet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported
TESTS = Path(__file__).parents[1]

with quick_imports():
    import anthropic
    import hypothesis.strategies
    import mcp
    import openai
    import schemathesis
    import torch.distributed.tensor
    import transformers

    import tests.support.fork_server

MODULES = (anthropic, hypothesis, mcp, openai, schemathesis, torch, transformers, tests)
"""What is held besides."""

gc.disable()
# its import hook rewrites assertions, once for all workers
config = _prepareconfig([str(TESTS)])
for path in sorted(TESTS.rglob("test_*.py")):
    try:
        importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
    except Exception:  # each worker reports it as it collects
        continue
config._ensure_unconfigure()
gc.enable()
gc.collect()
gc.freeze()
