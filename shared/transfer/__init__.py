"""The weight plane: versions of the parameters on their way from the trainer to the engines, and on disk."""
