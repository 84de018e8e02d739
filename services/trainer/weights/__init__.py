"""Pushes of weights to the engines: `pusher` decides and drives, `stage_sender` exports and sends, channels carry the buckets."""
