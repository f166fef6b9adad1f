"""Many trainings, each in its own process and run folder, side by side and resumable."""
