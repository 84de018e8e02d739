"""What most tests import of other projects, held by a server that `tests.support.fork_server` forks xdist's workers from."""

import os

import setproctitle

from shared.runtime import quick_imports

setproctitle.getproctitle()  # it looks for the command line's place by the environment, which must not have changed yet
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it when it is imported

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
"""What is held."""
