"""Draws the figures of a server."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.cli.chat.safe_text import one_line
from penstock.cli.output import duration
from penstock.cli.top.figures import Period, ScrapeDifference
from penstock.cli.top.scrape import Scrape
from penstock.config import format_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

BAR = 20  # characters
_NONE = "–"
# The name of each row, and its text.
_ROWS: tuple[tuple[str, Callable[[Period], str]], ...] = (
    ("tokens/s in", lambda period: f"{period.prompt_rate:,.1f}"),
    ("tokens/s out", lambda period: f"{period.output_rate:,.1f}"),
    ("requests/s ended", lambda period: f"{period.request_rate:,.2f}"),
    ("first token", lambda period: _times(period.first_token)),
    ("between tokens", lambda period: _times(period.per_token)),
    ("whole request", lambda period: _times(period.whole)),
    ("queue, mean", lambda period: _time(period.queued)),
    ("step: all, host", lambda period: f"{_time(period.step)}, {_time(period.host)}"),
    ("tokens of a step", lambda period: _batch(period)),
    ("prefix cache hits", lambda period: _share(period.prefix_hits)),
    ("drafts accepted", lambda period: _share(period.accepted)),
    ("memory bandwidth", lambda period: _share(period.bandwidth)),
    ("compute", lambda period: _share(period.compute)),
)


def screen(url: str, now: Scrape, before: Scrape | None, trouble: str = "") -> "RenderableType":
    """Returns the screen: each model's figures since `before`, and since the server's start. `trouble` is why the
    server does not answer."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(_heading(url, now), style="bold")]
    if trouble:
        parts.append(Text(one_line(trouble, 200), style="bold red"))
    parts += [Text(), _models(now, before)] if len(now.models) > 1 else []  # the rest may not fit the terminal
    for model in now.models:
        parts += [Text(), *_model(model, now, before)]
    if "penstock_fleet_requests_held" in now.samples:
        parts += [Text(), _replicas(now)]
    parts += [Text(), Text(_server(now))]
    return Group(*parts)


def _models(now: Scrape, before: Scrape | None) -> "RenderableType":
    """A line for each model."""
    from rich.table import Table
    from rich.text import Text

    titles = ("model", "state", "running", "waiting", "KV cache", "tok/s in", "out", "TTFT p50 / p99")
    table = Table(*titles, box=None, padding=(0, 2, 0, 0), header_style="dim")
    names = ("engine_healthy", "engine_asleep", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    seconds = _uptime(now) if before is None else now.moment - before.moment
    for model in now.models:
        healthy, asleep, *gauges = (now.value(f"penstock_{name}", model_name=model) or 0.0 for name in names)
        state = Text("asleep" if asleep else "ready") if healthy else Text("down", style="bold red")
        period = ScrapeDifference(model, now, before, seconds).period()
        rates = (f"{rate:,.1f}" for rate in (period.prompt_rate, period.output_rate))
        counts = (f"{gauges[0]:.0f}", f"{gauges[1]:.0f}", f"{gauges[2]:.1%}")
        table.add_row(
            Text(one_line(model, 40)), state, *counts, *rates, _times(period.first_token and period.first_token[::2])
        )
    return table


def _model(model: str, now: Scrape, before: Scrape | None) -> list["RenderableType"]:
    from rich.table import Table
    from rich.text import Text

    healthy = now.value("penstock_engine_healthy", model_name=model)
    state = Text(one_line(model), style="bold")
    asleep = now.value("penstock_engine_asleep", model_name=model)
    ready = "  asleep: a request wakes it" if asleep else "  ready"
    state.append(ready if healthy else "  the engine does not serve", style="green" if healthy else "bold red")
    running, waiting, places, usage = (
        now.value(f"penstock_{name}", model_name=model) or 0.0
        for name in ("num_requests_running", "num_requests_waiting", "max_num_seqs", "kv_cache_usage_perc")
    )
    batch = Text(
        f"batch     {_bar(running / places if places else 0)} {running:.0f} of {places:.0f}, {waiting:.0f} waiting"
    )
    cache = Text(f"KV cache  {_bar(usage)} {usage:.1%}")
    restarts, preemptions = (
        now.value(f"penstock_{name}_total", model_name=model) or 0.0 for name in ("engine_restarts", "num_preemptions")
    )
    cache.append(f", {preemptions:,.0f} preemptions, ")
    cache.append(f"{restarts:,.0f} engine restarts", style="bold red" if restarts else "")
    whole = ScrapeDifference(model, now, None, _uptime(now)).period()
    seconds = 0.0 if before is None else now.moment - before.moment
    last = None if before is None else ScrapeDifference(model, now, before, seconds).period()
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("p50 / p95 / p99 of times")
    table.add_column(f"last {seconds:.0f} s", justify="right", min_width=26)
    table.add_column("since the start", justify="right", min_width=26)
    for name, text in _ROWS:
        table.add_row(name, _NONE if last is None else text(last), text(whole))
    return [state, batch, cache, Text(), table]


def _replicas(now: Scrape) -> "RenderableType":
    from rich.table import Table

    titles = ("engine", "status", "requests", "running", "waiting", "KV cache", "expected in cache", "moved")
    table = Table(*titles, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for labels in now.samples.get("penstock_replica_requests_open", ()):
        name = dict(labels)["replica"]
        statuses = now.samples.get("penstock_replica_status", {})
        here = {dict(own)["status"] for own, value in statuses.items() if value and dict(own)["replica"] == name}

        def value(series: str, replica: str = name) -> float:
            return now.value(f"penstock_replica_{series}", replica=replica) or 0.0

        tokens = value("prompt_tokens_total")
        hits = value("expected_cached_tokens_total") / tokens if tokens else None
        counts = (f"{value(f'requests_{kind}'):.0f}" for kind in ("open", "running", "waiting"))
        rest = (f"{value('kv_cache_usage'):.1%}", _share(hits), f"{value('requests_moved_total'):.0f}")
        table.add_row(one_line(name, 40), *here, *counts, *rest)
    held = now.value("penstock_fleet_requests_held") or 0.0
    wanted = now.value("penstock_fleet_replicas_wanted")
    notes = [f"{wanted:.0f} engines are wanted"] if wanted is not None else []
    notes += [f"{held:.0f} requests wait for an engine"] if held else []
    table.caption = "; ".join(notes) or None
    return table


def _heading(url: str, now: Scrape) -> str:
    in_flight = now.value("penstock_http_requests_in_flight") or 0.0
    return f"{one_line(url, 200)}  up {_age(_uptime(now))}  {in_flight:.0f} requests in flight"


def _server(now: Scrape) -> str:
    def requests(*codes: str) -> float:
        return sum(now.value("penstock_http_requests_total", code=code) or 0.0 for code in codes)

    engine, api = now.value("penstock_engine_resident_memory_bytes"), now.value("process_resident_memory_bytes")
    dropped = now.value("penstock_log_lines_dropped_total") or 0.0
    memory = ", ".join(
        f"{name} {format_bytes(int(size))}" for name, size in (("engine", engine), ("API", api)) if size is not None
    )
    return (
        f"memory: {memory or _NONE}\nsince the start: {requests('500', '503'):,.0f} requests failed, "
        f"{requests('429'):,.0f} refused, {dropped:,.0f} log lines dropped"
    )


def _uptime(now: Scrape) -> float:
    import time

    started = now.value("process_start_time_seconds")
    return max(time.time() - started, 1.0) if started else 1.0


def _age(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def _bar(share: float) -> str:
    full = round(min(max(share, 0.0), 1.0) * BAR)
    return "█" * full + "░" * (BAR - full)


def _time(seconds: float | None) -> str:
    return _NONE if seconds is None else duration(seconds)


def _times(values: tuple[float, ...] | None) -> str:
    if values is None:
        return _NONE
    figures, units = zip(*(duration(value).split(" ") for value in values), strict=True)
    if len(set(units)) == 1:  # said once, so that the row fits into 80 columns
        return f"{' / '.join(figures)} {units[0]}"
    return " / ".join(duration(value) for value in values)


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"


def _batch(period: Period) -> str:
    if period.prefill is None or period.decode is None:
        return _NONE
    drafts = f" + {period.drafts:,.1f} drafts" if period.drafts else ""
    return f"{period.prefill:,.1f} prefill + {period.decode:,.1f} decode{drafts}"
