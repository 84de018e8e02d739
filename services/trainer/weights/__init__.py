"""Weights on their way to the engines: `pusher` decides and drives, `sender` exports and sends, `lane` and its kinds carry."""
