"""A run as it is found: its directory, its servers, its ledger, and the views and summaries made from them."""
