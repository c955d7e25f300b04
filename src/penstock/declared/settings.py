"""The settings of a server. These tables give the flags and their help, the environment variables, the keys of a
configuration file, the checks of values, constant defaults with their reasons, what `penstock plan` shows, and the
table in docs/configuration.md.

To add a setting:

1. Add a row to `server_settings.py`, or to `engine_settings.py` if the commands that need no server have it, too.
2. Add a field of its name to the struct that holds its value: `ServerConfig`, or `ServerLimits` if requests are checked
   against it (both in config/server.py), or `EngineConfig` (config/engine.py). Its default is `DEFAULTS["name"]`.

`python scripts/document_tables.py` then writes its row in docs/configuration.md.

A default that depends on the model or the machine is computed in config/defaults.py. Values that are not simply of
their kind are read in config/settings.py. config/resolve.py checks how settings fit together.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.declared.engine_settings import ENGINE
from penstock.declared.server_settings import SERVER
from penstock.declared.setting import Setting, text

MODEL = Setting(
    "model",
    text("MODEL", 0),
    "A [name](models.md#names): of `penstock list`, a folder, a GGUF file, or a hub id such as `org/name` or "
    "`org/name:Q4_K_M`",
    words="`smollm2-135m` if its package is installed, else `python-8m`",
    more="On the command line, also without `--model`",
)

SETTINGS: Mapping[str, Setting] = MappingProxyType(
    {
        each.name: each
        for each in (MODEL, *(row for table in (ENGINE, SERVER) for rows in table.values() for row in rows))
    }
)
# The constant ones.
DEFAULTS: Mapping[str, Any] = MappingProxyType({name: each.default for name, each in SETTINGS.items() if each.why})
