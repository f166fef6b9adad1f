"""Rounds of self-play, training and comparison, of which only those that helped are kept."""
