"""Defines the arguments of `penstock reload | sleep | wake`."""

from typing import Annotated

import typer

URL = typer.Argument(metavar="URL", help="The server's address.")
DEFAULT = "http://127.0.0.1:8000"
KEY = typer.Option(metavar="KEY", envvar="PENSTOCK_ADMIN_KEY", help="The server's admin key.")


def add_operate_commands(app: typer.Typer) -> None:
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
    app.command(
        "repository",
        short_help="Show, load or unload the models of a running server.",
        help="Show the models of a running server's repository. With load or unload and a NAME, change what is loaded.",
    )(_repository)


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


def _repository(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="status, load or unload.")] = "status",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The model to load or unload.")] = None,
    *,
    url: Annotated[str, typer.Option(metavar="URL", help="The server's address.")] = DEFAULT,
    dependents: Annotated[bool, typer.Option("--dependents", help="Also unload the members of a pipeline.")] = False,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", envvar="PENSTOCK_ADMIN_KEY", help="The server's admin key or API key.")
    ] = None,
) -> None:
    from penstock.cli.operate.repository import RepositoryServer

    if what not in ("status", "load", "unload"):
        raise ValueError(f"WHAT is {what!r}: give status, load or unload")
    if (not name) != (what == "status"):
        raise ValueError(f"penstock repository {what} takes {'no name' if what == 'status' else 'the name of a model'}")
    server = RepositoryServer(url, key)
    if name is None:
        server.show()
    else:
        server.change(name, what, dependents=dependents)
