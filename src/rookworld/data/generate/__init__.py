"""Rows of our own making: positions, labels, moves, mates."""
