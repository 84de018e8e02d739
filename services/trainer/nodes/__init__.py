"""A trainer over several nodes: the ranks that each node's agent (`shared.nodes`) starts for an attempt."""
