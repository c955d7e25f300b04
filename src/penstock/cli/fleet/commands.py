"""Defines the arguments of `penstock engine` and `penstock fleet status | drain | scale`."""

from typing import Annotated

import typer

from penstock.cli import completion
from penstock.cli.options import ENGINE, ENGINE_HOST, Flags, takes
from penstock.cli.sections import SectionedHelp
from penstock.cli.usage import PlainUsage
from penstock.messages import EngineRole

ENGINES = typer.Argument(metavar="ENGINES", help="As --engines of serve: HOST:PORT,... or file:PATH or dns:NAME:PORT.")
KEY = typer.Option(metavar="KEY", envvar="PENSTOCK_FLEET_KEY", help="The engines' key.")
AUTHORITY = typer.Option(metavar="FILE", envvar="PENSTOCK_FLEET_CA", help="Use TLS, as --fleet-ca of serve.")

MODEL = typer.Argument(
    metavar="MODEL", help="The model, named as in penstock serve.", autocompletion=completion.model_names
)
LISTEN = typer.Option(metavar="HOST:PORT", help="Address for servers to connect to; port 0 takes a free one.")
ROLE = typer.Option(
    metavar="ROLE", help="alone; prefill, decode or both: exchange KV blocks with other engines, by what it computes."
)
PAGE_PORT = typer.Option(
    metavar="PORT", min=0, max=65535, help="With a role, the port for other engines to read KV blocks; 0: a free one."
)

fleet = typer.Typer(name="fleet", rich_markup_mode=None)


def add_fleet_commands(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.command(
        "engine",
        cls=SectionedHelp,
        short_help="Run an engine without HTTP, for servers elsewhere.",
        help="Run an engine without HTTP. Servers started with serve --engines HOST:PORT send it requests.",
    )(_engine)
    app.add_typer(fleet)


@takes(ENGINE, ENGINE_HOST)
def _engine(
    context: typer.Context,
    *,
    model: Annotated[str | None, MODEL] = None,
    listen: Annotated[str, LISTEN] = "127.0.0.1:9000",
    role: Annotated[EngineRole, ROLE] = "alone",
    page_port: Annotated[int, PAGE_PORT] = 0,
    flags: Flags,
) -> None:
    from penstock.cli.serving.engine_host import serve_engine

    serve_engine(model, listen, flags, context.obj, role=role, page_port=page_port)


@fleet.callback(help="Look at engines elsewhere, and end them.", invoke_without_command=True)
def root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@fleet.command(cls=PlainUsage, help="Show what each engine does. Exit status: 0 if all answer, else 1.")
def status(
    engines: Annotated[str, ENGINES],
    *,
    fleet_key: Annotated[str | None, KEY] = None,
    fleet_ca: Annotated[str, AUTHORITY] = "",
) -> None:
    from penstock.cli.fleet.engines import show_status

    raise SystemExit(show_status(engines, fleet_key, fleet_ca))


@fleet.command(cls=PlainUsage, help="Let engines end: new requests go elsewhere, those in progress end or move.")
def drain(
    engines: Annotated[str, ENGINES],
    *,
    grace: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=86_400, help="Time that requests may stay before they move.")
    ] = 30.0,
    fleet_key: Annotated[str | None, KEY] = None,
    fleet_ca: Annotated[str, AUTHORITY] = "",
) -> None:
    from penstock.cli.fleet.engines import drain as command

    raise SystemExit(command(engines, grace, fleet_key, fleet_ca))


@fleet.command(cls=PlainUsage, help="Keep as many engines as the load needs, on Kubernetes or Ray, until SIGTERM.")
def scale(
    engines: Annotated[str, ENGINES],
    *,
    on: Annotated[str, typer.Option(metavar="WHERE", help="kubernetes:[NAMESPACE/]KIND/NAME, or ray.")],
    replicas: Annotated[str, typer.Option(metavar="N|MIN:MAX", help="So many engines, or as many as the load needs.")],
    run: Annotated[str, typer.Option(metavar="'MODEL FLAGS'", help="Ray: the engine, as for penstock engine.")] = "",
    threads: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Ray: processors of an engine.")] = 1,
    servers: Annotated[
        str, typer.Option(metavar="URL,...", help="Servers whose waiting requests wake an engine.")
    ] = "",
    window: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, max=86_400, help="Fewer engines must have been enough so long.")
    ] = 300.0,
    idle: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, max=86_400, help="MIN 0: time without a request to the last end.")
    ] = 900.0,
    standby: Annotated[int, typer.Option(metavar="N", min=0, max=64, help="Engines beyond the need.")] = 0,
    kubernetes_api: Annotated[str, typer.Option(metavar="URL", help="API server, as of kubectl proxy.")] = "",
    fleet_key: Annotated[str | None, KEY] = None,
    fleet_ca: Annotated[str, AUTHORITY] = "",
) -> None:
    from penstock.cli.fleet.scaling import ScaleSettings, keep_scaled

    raise SystemExit(
        keep_scaled(
            ScaleSettings(
                engines=engines,
                on=on,
                replicas=replicas,
                run=run,
                threads=threads,
                servers=servers,
                window=window,
                idle=idle,
                standby=standby,
                api=kubernetes_api,
                key=fleet_key,
                authority=fleet_ca,
            )
        )
    )
