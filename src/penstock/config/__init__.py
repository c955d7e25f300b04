"""Configuration: the settings that an operator can give, and one pure function that chooses the rest and records where
each value came from. `settings.Settings` is the schema.
"""

from penstock.config.engine import EngineConfig
from penstock.config.facts import ModelFacts
from penstock.config.machine.hardware import Hardware, detect_hardware
from penstock.config.memory import DoesNotFit, MemoryPlan, memory_table, size_memory, size_ranks
from penstock.config.resolve import Resolved, resolve, resolve_front, resolve_server
from penstock.config.server import ServerConfig
from penstock.config.sizes import format_bytes, parse_bytes
from penstock.config.sources import ConfigError, Given, read_settings
from penstock.config.split import RankPlace, Split
from penstock.config.weights import stored_as
