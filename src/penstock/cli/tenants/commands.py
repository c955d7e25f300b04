"""Defines the commands `penstock tenants | ledger | audit | logs`: their arguments and help.

Each command imports its code when it runs, so that the command line starts fast.
"""

from typing import Annotated

import typer

from penstock.cli.usage import PlainUsage

FILE = typer.Argument(metavar="FILE", help="The tenants file, see docs/tenants.md.")
TENANT = typer.Argument(metavar="TENANT", help="A tenant's name.")
KEY = typer.Option("--key", metavar="NAME", help="The key's name, shown in logs and in the ledger.")
DAYS = typer.Option(metavar="N", min=1, max=36500, help="Days for which the key is valid. Default: no end.")
LEDGER = typer.Option(metavar="FILE", help="The ledger. Default: that of the server on --port.")
PORT = typer.Option(metavar="N", min=0, max=65535, help="The port of the server whose ledger it is.")
SINCE = typer.Option(metavar="DAY", help="The first day, such as 2026-11-01, in UTC. Default: all.")
UNTIL = typer.Option(metavar="DAY", help="The last day. Default: today.")
ONLY = typer.Option("--tenant", metavar="NAME", help="Only this tenant.")


def add_tenant_commands(app: typer.Typer) -> None:
    """Adds the commands to `app`, the command line."""
    tenants = typer.Typer(name="tenants", rich_markup_mode=None, no_args_is_help=True)
    tenants.command("add", cls=PlainUsage, help="Make a key, and a tenant if it is new. The key is shown once.")(_add)
    tenants.command("rotate", cls=PlainUsage, help="Make a key in the place of one. The key is shown once.")(_rotate)
    tenants.command("list", cls=PlainUsage, help="List the tenants of a file, with their keys.")(_list)
    tenants.command("check", cls=PlainUsage, help="Check a tenants file. Exit status: 0, or 1 for a mistake.")(_check)
    app.add_typer(tenants, help="Make keys for teams that share a server.")
    ledger = typer.Typer(name="ledger", rich_markup_mode=None, no_args_is_help=True)
    ledger.command("summary", help="Show what tenants have used, and what it costs.")(_summary)
    ledger.command("export", help="Print the requests of the ledger, as CSV or JSON lines.")(_export)
    app.add_typer(ledger, help="Show what tenants have used of a server.")
    audit = typer.Typer(name="audit", rich_markup_mode=None, no_args_is_help=True)
    audit.command(
        "verify",
        cls=PlainUsage,
        help="Check an audit log. Exit status: 0, or 1 with the first line that is wrong.",
    )(_verify)
    app.add_typer(audit, help="Check a server's audit log.")
    app.command("logs", help="Show the last requests of a ledger, such as slow ones.")(_logs)


def _add(
    file: Annotated[str, FILE],
    tenant: Annotated[str, TENANT],
    *,
    key: Annotated[str, KEY] = "default",
    expires_in: Annotated[int | None, DAYS] = None,
    model: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Model that it may use; repeatable.")] = None,
    wire: Annotated[list[str] | None, typer.Option(metavar="NAME", help="API that it may use; repeatable.")] = None,
    admin: Annotated[bool, typer.Option("--admin", help="It may reload, put to sleep and wake the server.")] = False,
) -> None:
    from penstock.cli.tenants.keys import add

    add(file, tenant, key, expires_in, tuple(model or ()), tuple(wire or ()), admin=admin)


def _rotate(
    file: Annotated[str, FILE],
    tenant: Annotated[str, TENANT],
    *,
    key: Annotated[str, KEY] = "default",
    keep_days: Annotated[
        int, typer.Option(metavar="N", min=0, max=366, help="Days for which the old key stays valid.")
    ] = 7,
) -> None:
    from penstock.cli.tenants.keys import rotate

    rotate(file, tenant, key, keep_days)


def _list(file: Annotated[str, FILE]) -> None:
    from penstock.cli.tenants.keys import list_tenants

    list_tenants(file)


def _check(file: Annotated[str, FILE]) -> None:
    from penstock.cli.tenants.keys import check

    check(file)


def _summary(
    *,
    by: Annotated[
        str, typer.Option(metavar="NAMES", help="Groups: tenant, key, model, wire, hour, day, month.")
    ] = "tenant",
    since: Annotated[str | None, SINCE] = None,
    until: Annotated[str | None, UNTIL] = None,
    tenant: Annotated[str | None, ONLY] = None,
    ledger: Annotated[str | None, LEDGER] = None,
    port: Annotated[int, PORT] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    from penstock.cli.tenants.ledger import show_summary

    show_summary(by, since, until, tenant, ledger, port, as_json=as_json)


def _export(
    *,
    since: Annotated[str | None, SINCE] = None,
    until: Annotated[str | None, UNTIL] = None,
    tenant: Annotated[str | None, ONLY] = None,
    form: Annotated[str, typer.Option("--format", metavar="NAME", help="csv or jsonl.")] = "csv",
    ledger: Annotated[str | None, LEDGER] = None,
    port: Annotated[int, PORT] = 8000,
) -> None:
    from penstock.cli.tenants.ledger import export

    export(since, until, tenant, form, ledger, port)


def _verify(
    file: Annotated[str, typer.Argument(metavar="FILE", help="The audit log.")],
    *,
    heads: Annotated[str | None, typer.Option(metavar="FILE", help="The heads, of serve --audit-heads.")] = None,
    key_file: Annotated[str | None, typer.Option(metavar="FILE", help="The secret that signs heads.")] = None,
    ledger: Annotated[
        str | None, typer.Option(metavar="FILE", help="Compare the numbers of requests with this ledger.")
    ] = None,
) -> None:
    import sys

    from penstock.cli.tenants.audit import verify

    sys.exit(verify(file, heads, key_file, ledger))


def _logs(
    *,
    tenant: Annotated[str | None, ONLY] = None,
    slow: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="Only requests that took as long, or longer.")
    ] = None,
    errors: Annotated[bool, typer.Option("--errors", help="Only requests that failed.")] = False,
    last: Annotated[int, typer.Option(metavar="N", min=1, max=1_000_000, help="At most the last N.")] = 50,
    ledger: Annotated[str | None, LEDGER] = None,
    port: Annotated[int, PORT] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines.")] = False,
) -> None:
    from penstock.cli.tenants.logs import show_logs

    show_logs(tenant, slow, last, ledger, port, errors=errors, as_json=as_json)
