"""Shared parts of every process: the base of a service, child processes, servers, HTTP endpoints, telemetry, errors, files."""
