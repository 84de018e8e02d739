"""NATS: the connection, streams and subjects, work queues, leases, and the registry of live services."""
