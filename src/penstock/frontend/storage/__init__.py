"""Stores responses, files and batches in one SQLite database."""
