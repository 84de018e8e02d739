"""Reward environments outside of Myxo: the protocol they speak, and its clients over HTTP and over NATS. See ``docs/environments.md``."""
