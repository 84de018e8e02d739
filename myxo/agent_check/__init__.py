"""Tries an agent without a model: `myxo env check` for functions, commands and services behind URLs."""
