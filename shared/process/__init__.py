"""Child processes, embedded servers, and pools of worker processes."""
