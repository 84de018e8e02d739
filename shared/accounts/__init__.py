"""Accounts on NATS and Redis, one a kind of service: what each may do, the servers' configs, passwords and certificates."""
