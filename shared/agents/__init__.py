"""Agents that come with Myxo, and what the user's own can be made of. They speak to the gateway as any other client does."""
