"""Exit codes of the command line; a signal's is 128 + its number."""

DONE = 0

FAILED = 1
"""An audit found a violation, or another error occurred."""

BAD_INPUT = 2
"""The input of a person cannot be used. Services end with the same code for it (`shared.runtime.service_base`)."""

RUN_FAILED = 3
"""A run was given up: a service ended again and again without a training step in between, or too many groups failed."""

INTERRUPTED = 130
"""The command ended by SIGINT with nothing to stop."""
