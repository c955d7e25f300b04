"""Penstock: an LLM inference server. The rooms and their contracts are described in docs/architecture.md."""

__version__ = "0.1.0"
