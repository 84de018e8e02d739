"""Services, workers and commands of ``myxo`` that these tests start are forked from one process that has their modules loaded."""

from tests.support.fork_server import forked_python

__all__ = ["forked_python"]
