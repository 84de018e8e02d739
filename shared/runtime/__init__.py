"""What every process needs: the base of a service, HTTP endpoints, embedded servers, telemetry, errors and how a failure ends a process."""
