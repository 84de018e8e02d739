"""Processes that run code which may block, crash or leave: verifiers and the user's functions. They can be killed, and are replaced."""
