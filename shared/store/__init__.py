"""The payloads of samples in Redis or Valkey."""
