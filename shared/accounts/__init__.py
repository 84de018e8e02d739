"""Accounts on NATS and Redis, one for each kind of service: what each may do, the servers' configs, passwords and certificates."""
