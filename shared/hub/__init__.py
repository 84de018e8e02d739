"""Models and data sets that a config names on the Hugging Face hub: their names, the commits they are pinned to, and their files."""
