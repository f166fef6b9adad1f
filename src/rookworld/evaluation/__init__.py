"""How good a model is: held-out rows, suites, games, its own world."""
