"""Rollouts: a new version of a model reaches requests only as far as its answers hold up."""
