"""Kinds of attention as data."""
