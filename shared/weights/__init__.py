"""What trainer and engines agree on about weights: how a push is laid out, how it is checked. No torch: its tensors come as bytes."""
