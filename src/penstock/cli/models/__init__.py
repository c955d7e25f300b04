"""Implements `penstock list | pull | show | rm`: the models on this machine. None of these commands loads torch."""
