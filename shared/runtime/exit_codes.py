"""Exit codes of the command line; a signal's is 128 + its number."""

DONE = 0

FAILED = 1
"""An audit's violation, a service that cannot be kept running, anything else that went wrong."""

BAD_INPUT = 2
"""The input of a person cannot be used. Services end with the same code for it (`shared.runtime.service_base`)."""

INTERRUPTED = 130
"""SIGINT, where nothing had to be stopped."""
