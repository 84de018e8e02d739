"""An engine over several nodes: its replica's service leads, those of the other nodes follow, each with a lease."""
