"""Implements `penstock simulate`."""
