"""Rows: what they are in files, where they come from, how they are made. Never imports torch."""
