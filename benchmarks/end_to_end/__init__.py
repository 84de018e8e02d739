"""A whole run of random weights and drawn lengths, at several bounds on staleness, beside what engine and trainer do alone."""
