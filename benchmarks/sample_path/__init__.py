"""The sample path measured whole: see ``python -m benchmarks.sample_path --help``."""
