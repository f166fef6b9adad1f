"""The one sampler, for training, evaluation and play."""
