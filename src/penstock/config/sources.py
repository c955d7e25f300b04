"""Settings from the command line, the environment and a YAML file, in this order of precedence, with their sources."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from penstock.config.wrong_setting import COMMAND_LINE, PREFIX, flag, unknown, wanted
from penstock.config.yaml_file import parse_yaml, read_yaml_text
from penstock.declared.settings import SETTINGS

if TYPE_CHECKING:  # pydantic takes longer to import than all else here, and an engine process does not need it
    from penstock.config.settings import GivenSettings

FILE_VARIABLE = PREFIX + "CONFIG"  # names the YAML file if the command line does not
KERNELS = frozenset({PREFIX + "ISA", PREFIX + "LIBRARY", PREFIX + "NO_KERNELS"})  # of the native kernels; not settings
MAX_FILE_BYTES = 1 << 20
SECRET = frozenset(name for name, setting in SETTINGS.items() if setting.secret)  # their values are never shown


class ConfigError(ValueError):
    """A setting is wrong; the message has its name, its source, its value and the values that are possible."""


@dataclass(frozen=True)
class Given:
    """The settings that were given. `sources` has an entry for every setting that is not None."""

    settings: "GivenSettings"
    sources: Mapping[str, str]


def read_settings(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    flags_source: str = COMMAND_LINE,
) -> Given:
    """The settings from the command line, else the environment, else the file. `flags` are by setting; None means not
    given. Only variables that begin with PENSTOCK_ are read. Errors say that flags come from `flags_source`.

    Raises ConfigError, also for a setting that does not exist.
    """
    from pydantic import ValidationError

    from penstock.config.settings import Settings

    environ = environ or {}
    if file is None and environ.get(FILE_VARIABLE):
        file = Path(environ[FILE_VARIABLE])
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value, source in _statements(flags or {}, environ, file, flags_source):
        if name not in SETTINGS:
            raise ConfigError(unknown(name, source, SETTINGS))
        if value is not None:
            values[name], sources[name] = value, source
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        [entry, *_] = error.errors()  # one at a time: it is one line
        raise ConfigError(_explain(entry, values, sources)) from None
    return Given(settings, sources)


def _statements(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None, flags_source: str
) -> Iterator[tuple[str, Any, str]]:
    """(setting, value, source), later ones over earlier ones."""
    if file is not None:
        for key, value, line in _read_yaml(file):
            if value is None:  # such as a key that a template has left empty
                raise ConfigError(f"{file}, line {line}: {flag(key)} has no value; give one, or leave the line out")
            yield key, value, f"{file}, line {line}"
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in {FILE_VARIABLE, *KERNELS}:
            yield variable.removeprefix(PREFIX).lower(), environ[variable], f"environment variable {variable}"
    for name, value in flags.items():
        yield name, value, flags_source


def _explain(entry: Any, values: Mapping[str, Any], sources: Mapping[str, str]) -> str:
    from penstock.config.settings import Settings

    name = str(entry["loc"][0])
    field = Settings.model_fields[name]
    value = "(hidden)" if name in SECRET else repr(values[name])
    accepted = Annotated[(field.annotation, *field.metadata)] if field.metadata else field.annotation
    return f"{flag(name)} ({sources[name]}) is {value}: {wanted(entry, accepted)}"


def _read_yaml(path: Path) -> list[tuple[str, Any, int]]:
    """(setting, value, line) of each setting in a file."""
    try:
        text = read_yaml_text(path, MAX_FILE_BYTES, f"--config {path}")
        content = parse_yaml(text, f"--config {path}")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    import yaml  # imported only if there is a file: it takes a while

    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if content is None:
        return []
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path}: expected one setting a line, as in 'max-model-len: 4096'")
    lines: dict[str, int] = {}  # yaml itself keeps the last of equal keys
    for key, _ in node.value:
        name, line = str(key.value).replace("-", "_"), key.start_mark.line + 1
        if name in lines:
            raise ConfigError(f"{path}, line {line}: {flag(name)} is set twice, first in line {lines[name]}")
        lines[name] = line
    named = {str(key).replace("-", "_"): value for key, value in content.items()}
    return [(name, value, lines.get(name, 1)) for name, value in named.items()]
