"""Defines the arguments of `penstock reload | sleep | wake | ps | stop | repository | rollout`."""

from typing import Annotated

import typer

from penstock.cli.usage import PlainUsage

URL = typer.Argument(metavar="URL", help="The server's address.")
DEFAULT = "http://127.0.0.1:8000"
KEY = typer.Option(metavar="KEY", envvar="PENSTOCK_ADMIN_KEY", help="The server's admin key.")
FLAG_URL = typer.Option("--url", metavar="URL", help="The server's address.")
FLAG_KEY = typer.Option("--key", metavar="KEY", envvar="PENSTOCK_ADMIN_KEY", help="The server's admin key or API key.")


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
        "ps",
        short_help="Show the models of a running server that have an engine.",
        help="Show the models of a running server that have an engine, and when each engine ends without a request.",
    )(_ps)
    app.command(
        "stop",
        cls=PlainUsage,
        short_help="End the engine of a model of a running server.",
        help="End the engine of a model of a running server's repository after its last request, to give its memory "
        "back. The next request starts it again.",
    )(_stop)
    app.command(
        "repository",
        short_help="Show, load or unload the models of a running server.",
        help="Show the models of a running server's repository. With load or unload and a NAME, change what is loaded.",
    )(_repository)
    app.command(
        "rollout",
        short_help="Let a new version of a model take over step by step.",
        help="Let a new version of a model in a running server's repository take over step by step, as far as its "
        "answers hold up. With start, pause, resume or abort and a NAME, change a rollout; else show all.",
    )(_rollout)


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


def _ps(url: Annotated[str, URL] = DEFAULT, *, key: Annotated[str | None, FLAG_KEY] = None) -> None:
    from penstock.cli.operate.running import show_running

    show_running(url, key)


def _stop(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The model.")],
    *,
    url: Annotated[str, FLAG_URL] = DEFAULT,
    key: Annotated[str | None, FLAG_KEY] = None,
) -> None:
    from penstock.cli.operate.running import stop

    stop(url, key, name)


def _repository(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="status, load or unload.")] = "status",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The model to load or unload.")] = None,
    *,
    url: Annotated[str, FLAG_URL] = DEFAULT,
    dependents: Annotated[bool, typer.Option("--dependents", help="Also unload the members of a pipeline.")] = False,
    key: Annotated[str | None, FLAG_KEY] = None,
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


def _rollout(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="status, start, pause, resume or abort.")] = "status",
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The model.")] = None,
    *,
    candidate: Annotated[
        int | None, typer.Option("--candidate", metavar="N", min=1, help="The version that is to take over.")
    ] = None,
    plan: Annotated[
        str, typer.Option("--plan", metavar="SHARES", help="Shares of the requests, in percent.")
    ] = "shadow,1,5,25,50,100",
    hold: Annotated[
        float, typer.Option("--hold", metavar="SECONDS", min=0, help="How long a stage lasts at least.")
    ] = 60,
    patience: Annotated[
        float, typer.Option("--patience", metavar="SECONDS", min=0, help="How long a stage lasts at most.")
    ] = 86400,
    judge: Annotated[
        list[str] | None,
        typer.Option(
            "--judge",
            metavar="NAME=TOLERANCE",
            help="What is compared, and how much worse the candidate may be. The default depends on the kind of model. "
            "Repeatable.",
        ),
    ] = None,
    url: Annotated[str, FLAG_URL] = DEFAULT,
    key: Annotated[str | None, FLAG_KEY] = None,
) -> None:
    from penstock.cli.operate.repository import RepositoryServer
    from penstock.cli.operate.rollout import WHAT, change_rollout, read_judges, read_plan, show_rollouts

    if what not in WHAT:
        raise ValueError(f"WHAT is {what!r}: give {', '.join(WHAT)}")
    if (not name) != (what == "status"):
        raise ValueError(f"penstock rollout {what} takes {'no name' if what == 'status' else 'the name of a model'}")
    if (candidate is None) != (what != "start"):
        raise ValueError(f"penstock rollout {what} {'needs' if what == 'start' else 'takes no'} --candidate")
    fields: dict[str, object] = {}
    if what == "start":
        fields = {"candidate": candidate, "plan": read_plan(plan), "hold": hold, "patience": patience}
        fields |= {"tolerances": read_judges(judge)} if judge else {}
    server = RepositoryServer(url, key)
    if name is None:
        show_rollouts(server)
    else:
        change_rollout(server, name, what, fields)
