"""Sessions: one rollout of an agent each, recorded turn by turn with the tokens that were sampled, and made into trajectories."""
