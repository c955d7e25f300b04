"""Settings from the command line, the environment and a YAML file, in this order of precedence, with their sources."""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # pydantic takes longer to import than all else here, and an engine process does not need it
    from penstock.config.settings import Settings

PREFIX = "PENSTOCK_"
FILE_VARIABLE = PREFIX + "CONFIG"  # names the YAML file if the command line does not
KERNELS = frozenset({PREFIX + "ISA", PREFIX + "LIBRARY", PREFIX + "NO_KERNELS"})  # of the native kernels; not settings
MAX_FILE_BYTES = 1 << 20
SECRET = frozenset({"api_key"})  # settings whose values are never shown


class ConfigError(ValueError):
    """A setting is wrong; the message has its name, its source, its value and the values that are possible."""


@dataclass(frozen=True)
class Given:
    """The settings that were given. `sources` has an entry for every setting that is not None."""

    settings: "Settings"
    sources: Mapping[str, str]


def read_settings(
    flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None, file: Path | None = None
) -> Given:
    """The settings from the command line, else the environment, else the file. `flags` are by setting; None means not
    given. Only variables that begin with PENSTOCK_ are read.

    Raises ConfigError, also for a setting that does not exist.
    """
    from pydantic import ValidationError

    from penstock.config.settings import Settings

    environ = environ or {}
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value, source in _statements(flags or {}, environ, file):
        if name not in Settings.model_fields:
            raise ConfigError(f"{source}: there is no setting {flag(name)}{_nearest(name, Settings.model_fields)}")
        if value is not None:
            values[name], sources[name] = value, source
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(entry, values, sources) for entry in error.errors())) from None
    return Given(settings, sources)


def flag(name: str) -> str:
    """The command line flag of a setting."""
    return "--" + name.replace("_", "-")


def _statements(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None
) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, source), later ones over earlier ones."""
    if file is not None:
        for key, value in _read_yaml(file).items():
            yield key, value, str(file)
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in {FILE_VARIABLE, *KERNELS}:
            yield variable.removeprefix(PREFIX).lower(), environ[variable], f"environment variable {variable}"
    for name, value in flags.items():
        yield name, value, "command line"


def _nearest(name: str, known: Iterable[str]) -> str:
    flags = [flag(field) for field in known]
    close = difflib.get_close_matches(flag(name), flags, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(flags)}"


def _explain(entry: Any, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    name = str(entry["loc"][0])
    message = entry["msg"].removeprefix("Value error, ")
    value = "(hidden)" if name in SECRET else repr(values[name])
    return f"{flag(name)} ({sources[name]}) is {value}: {message[0].lower()}{message[1:]}"


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml  # imported only if there is a file: it takes a while

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: more than {MAX_FILE_BYTES} bytes of settings")
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected one setting a line, as in 'max-model-len: 4096'")
    # yaml itself keeps the last of equal keys.
    keys = [str(key.value).replace("-", "_") for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"{path}: {flag(twice[0])} is set twice")
    return {str(key).replace("-", "_"): value for key, value in content.items()}
