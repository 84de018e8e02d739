"""What a bound on staleness costs in learning, and what the objective makes good: the same run under many bounds, seeds and objectives."""
