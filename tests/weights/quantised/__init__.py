"""Checkpoints as quantisation tools write them: writers in a few lines, and tests of what is read."""
