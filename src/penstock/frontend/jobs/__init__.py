"""Runs batches in the background of a server."""
