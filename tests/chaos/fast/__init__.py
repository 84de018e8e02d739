"""A whole run of production's services in one minute of nobody's CPU: forked processes, a scripted engine, a scripted optimizer step."""
