"""What a run has done, folded from its ledger: groups, batches, summaries, timelines."""
