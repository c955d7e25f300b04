"""What outlives a request: stored responses, files and batches, in one SQLite database."""
