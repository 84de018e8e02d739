"""One job over several nodes: each runs an agent with a lease in KV; the first announces attempts, in which the ranks of all take part.

The job is a role of the trainer, or an engine; what its ranks are, and how they start, is the service's own matter.
"""
