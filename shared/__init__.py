"""What every Myxo service shares: messages, bus, store, config, registry, telemetry, CLI. Torch-free, and CI proves it."""

__version__ = "0.1.0"
