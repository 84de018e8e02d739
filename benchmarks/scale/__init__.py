"""A model of the large scale: pushes of large models, rates of NATS, Redis and ledger, staleness; what breaks first, and at what size.

Nothing here is measured at that size. `push_model` and `plane_rates` compute from the figures in ``benchmarks/results`` and the nominal
rate of a link; `published_pushes` holds the model against what others have measured.
"""
