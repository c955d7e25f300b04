"""Decoders whose MLPs are mixtures of experts."""
