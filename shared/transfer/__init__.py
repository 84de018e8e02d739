"""The weight plane: versions of the parameters on their way from the trainer to the engines, and on disk."""

BATCH_INVARIANT = "MYXO_BATCH_INVARIANT"  # environment variable by which a process computes every row alike (`.batch_invariant`)
