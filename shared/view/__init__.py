"""The state and history of a run, from what its services publish: one model for the panel, `myxo status`, `myxo top` and the console."""
