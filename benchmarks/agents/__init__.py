"""What agents cost: the gateway beside the engine alone, prefix caches and session affinity, and many sessions at once."""
