"""The frame of every service process, and what its parts report to the registry."""
