"""Implements `penstock fleet`: look at the engines of a fleet, and end them without ending requests."""
