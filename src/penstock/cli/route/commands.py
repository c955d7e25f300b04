"""Defines the commands `penstock route fit | evaluate`: their arguments and help."""

from typing import Annotated

import typer

from penstock.cli.usage import PlainUsage

LABELS = typer.Argument(metavar="LABELS", help="Requests with the quality of both answers, see docs/gateway.md.")


def add_route_commands(app: typer.Typer) -> None:
    """Adds the commands to `app`, the command line."""
    route = typer.Typer(name="route", rich_markup_mode=None, no_args_is_help=True)
    route.command("fit", cls=PlainUsage, help="Make a classifier of prompts for a route of the providers file.")(_fit)
    route.command("evaluate", cls=PlainUsage, help="Show cost and quality of a route at several limits.")(_evaluate)
    app.add_typer(route, help="Choose between a small and a large model.")


def _fit(
    labels: Annotated[str, LABELS],
    *,
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Where the classifier is written.")] = "route.json",
) -> None:
    from penstock.cli.route.fit import fit_file

    fit_file(labels, out)


def _evaluate(
    labels: Annotated[str, LABELS],
    *,
    classifier: Annotated[
        str | None, typer.Option("--classifier", metavar="FILE", help="A file of route fit. Default: cascades only.")
    ] = None,
) -> None:
    from penstock.cli.route.evaluate import evaluate_file

    evaluate_file(labels, classifier)
