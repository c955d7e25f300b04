"""The ranks that share a model, and how tensors travel between them. Nothing is imported here."""
