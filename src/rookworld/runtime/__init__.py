"""GROUND: errors, settings, run folders, processes: what every room stands on."""
