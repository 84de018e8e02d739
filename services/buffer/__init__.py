"""The buffer: owns prompts and their order, admission, staleness, group assembly, batches and the ledger."""
