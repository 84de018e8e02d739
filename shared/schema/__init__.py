"""The data that crosses between services: messages, ledger records, samples and their encoding."""
