"""Defines the arguments of `penstock simulate` and `penstock plan fleet`."""

from typing import Annotated

import typer

from penstock.cli.usage import PlainUsage

PRICES = typer.Option(metavar="FILE", help="YAML file with prices of devices and providers.")
JSON = typer.Option("--json", metavar="FILE", help="Also write the figures to this file.")


def add_simulate_commands(app: typer.Typer) -> None:
    """Adds the commands to the command line. The name of one has two words: see `usage.run_app`."""
    app.command(
        "simulate",
        cls=PlainUsage,
        short_help="Simulate traffic on hardware that is not here.",
        help="Run the production scheduler on a virtual clock: what traffic feels like on some hardware, what it "
        "costs, and what breaks first. SCENARIO is a YAML file, or a name that --list prints.",
    )(_simulate)
    app.command(
        "plan fleet",
        cls=PlainUsage,
        short_help="Plan machines for some traffic, and their cost.",
        help="Search devices, splits and quantisations for the cheapest fleet that keeps to the targets, and simulate "
        "the best. Loads no model.",
    )(_plan_fleet)


def _simulate(
    scenario: Annotated[
        str | None, typer.Argument(metavar="SCENARIO", help="A YAML file, or a ready scenario.")
    ] = None,
    *,
    list_ready: Annotated[bool, typer.Option("--list", help="List the ready scenarios.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the scenario's file, to begin an own one with.")] = False,
    seed: Annotated[int | None, typer.Option(metavar="N", min=0, help="Another seed.")] = None,
    duration: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0.001, max=10_000_000, help="Another duration of the traffic."),
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE", help="Recorded traffic in place of the scenario's traces.")
    ] = None,
    prices: Annotated[str | None, PRICES] = None,
    fit: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LOG",
            help="Fit the cost of steps to a log of serve --event-log, and write it to --json. Repeat it for the logs "
            "of servers that ran on one machine at the same time.",
        ),
    ] = None,
    json_file: Annotated[str | None, JSON] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="Also write a page with plots here.")] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Run small scenarios from a page in the browser.")] = False,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address of --serve.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port of --serve; 0 takes a free one.")
    ] = 8010,
) -> None:
    from penstock.cli.simulate.command import fit_logs, list_scenarios, show_scenario, simulate

    others = {"--list": list_ready, "--show": show, "--fit": fit, "--json": json_file, "--html": html}
    if serve:
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"--serve shows runs in the browser only: leave out {' and '.join(given)}")
        from penstock.cli.simulate.live import serve_page

        serve_page(scenario, seed, duration, trace, prices, host, port)
    elif fit:
        fit_logs(fit, json_file)
    elif list_ready:
        list_scenarios()
    elif scenario is None:
        raise ValueError("penstock simulate needs SCENARIO: name a YAML file, or one of those that --list prints")
    elif show:
        show_scenario(scenario)
    else:
        changes = {"seed": seed, "duration": duration}
        changes = {name: value for name, value in changes.items() if value is not None}
        simulate(scenario, changes, trace, prices, json_file, html)


def _plan_fleet(
    *,
    model: Annotated[str, typer.Option(metavar="MODEL", help="A name such as llama-3.1-70b, or a folder.")],
    rate: Annotated[float, typer.Option(metavar="N", help="Requests a second at the busiest time.")],
    prompt: Annotated[int, typer.Option(metavar="N", help="Mean prompt tokens of a request.")] = 500,
    output: Annotated[int, typer.Option(metavar="N", help="Mean output tokens of a request.")] = 200,
    cached: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of a prompt that all have, for the prefix cache.")
    ] = 0.0,
    ttft: Annotated[float, typer.Option(metavar="SECONDS", help="Target of the time to the first token.")] = 1.0,
    tpot: Annotated[float, typer.Option(metavar="SECONDS", help="Target of the time for each further token.")] = 0.05,
    share: Annotated[float, typer.Option(metavar="SHARE", help="Share of requests that keep to both.")] = 0.95,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A device to consider; repeat it. Default: all with a price."),
    ] = None,
    prices: Annotated[str | None, PRICES] = None,
    simulated: Annotated[
        int, typer.Option(metavar="N", min=0, max=20, help="How many of the cheapest fleets to simulate.")
    ] = 3,
    json_file: Annotated[str | None, JSON] = None,
) -> None:
    from penstock.cli.plan.fleet import plan_fleet
    from penstock.simulate.planner import Demand

    demand = Demand(
        model=model, rate=rate, prompt=prompt, output=output, cached=cached, ttft=ttft, tpot=tpot, share=share
    )
    plan_fleet(demand, device or [], prices, simulated, json_file)
