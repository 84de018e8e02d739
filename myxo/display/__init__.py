"""The terminal's output: tables, pages, progress, and the picture of the reward."""
