"""Redis: where the payloads of samples are kept."""
