"""The run's history as tables: the ledger is folded once into a scratch database, and lists of any length are read from it page by page."""
