"""OpenTelemetry traces: one for each group from its admission to its training, for each training step and for each push of weights.

Every service exports its own part. No message carries a context: ids are derived from the run and from the trace's name, which all services
know. Nothing is exported, imported or started unless the environment names an OTLP endpoint.
"""
