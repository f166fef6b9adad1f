"""GRPO: the loop, its state, batches, credit, update. Importing it loads no torch."""
