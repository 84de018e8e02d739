"""The command-line application, which starts, watches, inspects and checks a run."""
