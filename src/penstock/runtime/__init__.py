"""The runtime: executes plans on this machine, with a persistent batch, paged KV and a sampler."""

from penstock.runtime.load import load_runner
from penstock.runtime.runner import ModelRunner

__all__ = ["ModelRunner", "load_runner"]
