"""A user's rollout function as a producer: in a process of its own it draws prompts from the buffer and hands finished groups in."""
