"""What the operator may say, and one pure function that fills in the rest and remembers where each value came from.

The schema of what may be said is `settings.Settings`.
"""

from penstock.config.engine import EngineConfig
from penstock.config.facts import ModelFacts
from penstock.config.hardware import Hardware, detect_hardware
from penstock.config.memory import DoesNotFit, MemoryPlan, memory_table, size_memory, size_ranks
from penstock.config.resolve import Resolved, resolve
from penstock.config.server import ServerConfig
from penstock.config.sizes import format_bytes, parse_bytes
from penstock.config.sources import ConfigError, Given, read_settings
from penstock.config.split import Place, Split
from penstock.config.weights import stored_as

__all__ = [
    "ConfigError",
    "DoesNotFit",
    "EngineConfig",
    "Given",
    "Hardware",
    "MemoryPlan",
    "ModelFacts",
    "Place",
    "Resolved",
    "ServerConfig",
    "Split",
    "detect_hardware",
    "format_bytes",
    "memory_table",
    "parse_bytes",
    "read_settings",
    "resolve",
    "size_memory",
    "size_ranks",
    "stored_as",
]
