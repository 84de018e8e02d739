"""What a terminal shows: tables, pages, progress, and the picture of the reward."""
