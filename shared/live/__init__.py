"""What a run does now, from what its services publish: one view that displays share."""
