"""Weights on their way to the engines: `pusher` decides and drives, `sender` exports and sends, `channel` and its kinds carry."""
