"""Metrics, logs and progress bars.

Nothing is global: `Metrics` takes a registry. Import from the modules: an engine's process does not need Prometheus.
"""
