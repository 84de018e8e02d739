"""Agents as programs: each rollout is a session of the gateway's, played by a function or a command of the user's in another process."""
