"""A trainer over several nodes: each runs an agent with a lease in KV; the first node announces attempts, in which all ranks take part."""
