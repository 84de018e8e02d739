"""A run as it is found: its directory, its servers, its versions."""
