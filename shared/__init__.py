"""The code that all Myxo services share: messages, bus, store, config, telemetry. Only `shared.transfer` imports torch; CI proves it."""

__version__ = "0.1.0"
