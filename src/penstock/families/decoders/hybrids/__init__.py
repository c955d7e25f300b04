"""Decoders with layers that keep states."""
