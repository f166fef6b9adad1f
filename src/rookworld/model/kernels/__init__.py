"""Kernels and recorded passes: what makes a model fast, never what it computes."""
