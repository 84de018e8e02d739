"""One engine, driven directly and through the rollout service, at equal running requests."""
