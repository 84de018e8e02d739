"""What a run's ledger has told so far, in a database that answers in pages."""
