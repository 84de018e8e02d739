"""The console: what a run does, live and afterwards, in a browser. It reads what other services report and store, and changes nothing."""
