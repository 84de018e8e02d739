"""The memory that a run's GPUs need, worked out from its config and the model's shape before anything is started (``myxo plan``)."""
