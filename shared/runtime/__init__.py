"""The ground floor of every process: errors, tasks, files, addresses, text, logs and metrics. It imports no other package of shared."""
