"""The reward service: scores the groups of every environment of a run, by verifiers of its own or by environments outside."""
