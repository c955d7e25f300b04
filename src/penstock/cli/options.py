"""Makes the flags of settings, which several commands share. A flag that is not given keeps the configured value or the
default.

Numbers stay text here: `Settings` checks them, as it does in a file and in the environment.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from penstock.cli.completion import one_of
from penstock.declared import settings
from penstock.declared.setting import Setting

Flags = Mapping[str, Any]


def _flag(setting: Setting) -> Any:
    kind, help = setting.kind, setting.flag_help
    if kind.name == "switch":
        names = setting.flag if kind.one_way else f"{setting.flag}/--no-{setting.flag[2:]}"
        return Annotated[bool | None, typer.Option(names, help=help)]
    complete = one_of(*kind.choices) if kind.choices else None
    option = typer.Option(metavar=kind.metavar, help=help, autocompletion=complete)
    return Annotated[list[str] | None, option] if kind.name == "list" else Annotated[str | None, option]


def _flags(table: Mapping[str, Sequence[Setting]]) -> Flags:
    return {setting.name: _flag(setting) for rows in table.values() for setting in rows}


_FILE = typer.Option(metavar="FILE", help="YAML file with settings, named like these flags.")
ENGINE: Flags = {"config": Annotated[str | None, _FILE], **_flags(settings.ENGINE)}
SERVER: Flags = _flags(settings.SERVER)
# The flags of penstock engine, which has no HTTP server.
ENGINE_HOST: Flags = {
    **_flags({name: settings.SERVER[name] for name in ("Model", "Logs and traces")}),
    **{
        name: SERVER[name]
        for name in (
            *("fleet_key", "fleet_ca", "allow_insecure_bind", "tls_certificate", "tls_key", "watermark"),
            *("max_waiting", "max_waiting_tokens", "target_itl", "step_deadline", "drain_timeout", "kv_disk"),
            *("kv_host", "preemption_notice", "watermark_key", "region"),
        )
    },
}


def takes(*groups: Flags) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds the flags of `groups` to a command.

    The command receives those that the user gave as its argument `flags`.
    """
    shared = {name: annotation for group in groups for name, annotation in group.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command)
        own = [parameter for name, parameter in signature.parameters.items() if name != "flags"]
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in shared.items()
        ]

        @functools.wraps(command)
        def with_flags(**values: Any) -> None:
            flags = {name: value for name in shared if (value := values.pop(name)) not in (None, [])}
            command(**values, flags=flags)

        with_flags.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        with_flags.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *added)}
        return with_flags

    return decorate
