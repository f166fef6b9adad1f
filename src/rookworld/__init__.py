"""Train a chess language model with verifiable rewards."""

__version__ = "0.1.0"
