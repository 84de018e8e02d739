"""Prompts and demonstrations: files, rows, their order, and which of them are left out."""
