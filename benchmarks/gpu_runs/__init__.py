"""Whole runs of the arithmetic example in layouts of several GPUs, each with figures that show that it is right."""
