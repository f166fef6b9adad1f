"""The page in the browser: a board, what the model thinks, its world, checkpoints, live runs."""
