"""The versions of a model that a server serves one after another."""
