"""SURFACE: one door (`main.py`), one file a command family; the only room that prints."""
