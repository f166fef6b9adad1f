"""Supervised training from rows. Importing it loads no torch."""
