"""SURFACE: what each command does with its arguments, and what it prints."""
