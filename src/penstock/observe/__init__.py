"""Metrics, logs and progress. Nothing global: a `Metrics` is made with a registry and passed on.

Each is imported from its module: an engine's process shows progress, and has no use for Prometheus.
"""
