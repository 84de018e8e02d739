"""Failure tests: seeded, replayable by their seed."""
