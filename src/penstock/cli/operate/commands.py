"""Defines the arguments of `penstock reload | sleep | wake`."""

from typing import Annotated

import typer

URL = typer.Argument(metavar="URL", help="The server's address.")
DEFAULT = "http://127.0.0.1:8000"
KEY = typer.Option(metavar="KEY", envvar="PENSTOCK_ADMIN_KEY", help="The server's admin key.")


def add_operate_commands(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command(
        "reload",
        short_help="Load a running server's model and settings again.",
        help="Load the model of a running server again, with the settings that its file and its flags have now. "
        "Requests in progress end on the old one, and none fails.",
    )(_reload)
    app.command(
        "sleep",
        short_help="End a running server's engine until a request comes.",
        help="End the engine of a running server, to give its memory back. The next request starts it again.",
    )(_sleep)
    app.command("wake", help="Start the engine of a server that is asleep.")(_wake)


def _reload(
    url: Annotated[str, URL] = DEFAULT,
    *,
    drain_first: Annotated[
        bool,
        typer.Option("--drain-first", help="End the old engine before the new one starts; new requests wait."),
    ] = False,
    admin_key: Annotated[str | None, KEY] = None,
) -> None:
    from penstock.cli.operate.ask import ask

    ask(url, "/reload", admin_key, "?drain_first=true" if drain_first else "")


def _sleep(url: Annotated[str, URL] = DEFAULT, *, admin_key: Annotated[str | None, KEY] = None) -> None:
    from penstock.cli.operate.ask import ask

    ask(url, "/sleep", admin_key)


def _wake(url: Annotated[str, URL] = DEFAULT, *, admin_key: Annotated[str | None, KEY] = None) -> None:
    from penstock.cli.operate.ask import ask

    ask(url, "/wake_up", admin_key)
