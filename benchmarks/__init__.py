"""Measurements, one command each: figures as JSON in ``results/``, a table on standard output or in the docs."""
