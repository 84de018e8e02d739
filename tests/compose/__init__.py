"""The compose files with every service in its container. Needs a Docker engine."""
