"""JOINT: model x task. Prompts become groups of sampled, judged completions."""
