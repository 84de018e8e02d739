"""Starts a run on this machine and keeps its processes alive."""
