"""A run as it is found: its directory, its servers, its ledger, and what can be told from them."""
