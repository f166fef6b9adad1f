"""Group-relative policy optimisation as pure functions on tensors.

Advantages, KL to the reference, policy losses, schedules, and the guard that decides when a run is
ill. Nothing here knows chess, a model, a file or a clock; a variant is a function chosen by name.
"""
