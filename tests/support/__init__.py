"""What several test suites share: tiny models, real engines, process groups. Nothing here is a double."""
