"""Shows simulations in the browser while they run: a page, the report so far, and commands to begin and stop a run."""

import json
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import msgspec

from penstock.cli.address import bind, listen, url_of
from penstock.cli.simulate.command import load, report_of, result_of
from penstock.cli.simulate.page import page_of
from penstock.simulate.build import build
from penstock.simulate.claims import judge
from penstock.simulate.prices import BOOK, PriceBook, load_prices
from penstock.simulate.scenario import ScenarioFile, ready_scenarios
from penstock.simulate.simulation import Simulation

MOST_REQUESTS = 100_000  # of all variants of a run
MOST_SECONDS = 300.0  # that a run takes
LOOK_SECONDS = 0.5  # between reports of a run
MAX_BODY = 4096  # bytes of a command
READ_SECONDS = 10.0  # for a client to send its request


class Commanded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that the page asks for. None: the scenario's own value."""

    scenario: str
    seed: int | None = None
    duration: float | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed <= 2**63 - 1:
            raise ValueError(f"seed {self.seed}: give a whole number from 0 to {2**63 - 1}")
        if self.duration is not None and not 0.001 <= self.duration <= 10_000_000:
            raise ValueError(f"duration {self.duration:g}: give 0.001 to 10000000 seconds")


class RunStopped(Exception):
    """The run was ended before its time."""


class LiveRuns:
    """Runs one scenario at a time, in a thread, and holds its report so far."""

    def __init__(self, named: str | None, trace: str | None, prices: PriceBook) -> None:
        """`named`: the scenario of the command line, which may be a file. The others are the ready ones. `trace`: its
        recorded traffic."""
        self.names = list(dict.fromkeys([*([named] if named else []), *ready_scenarios()]))
        self._named, self._trace, self._prices = named, trace, prices
        self._lock, self._stop = Lock(), Event()
        self._thread: Thread | None = None
        self._looked = 0.0
        self.state: dict[str, Any] = {"status": "idle"}  # replaced as a whole, never changed

    def begin(self, command: Commanded) -> bool:
        """Begins a run. Returns False if one is going on. Raises ValueError for a wrong scenario."""
        if command.scenario not in self.names:
            raise ValueError(f"the scenario {command.scenario!r} is not offered: name one of {', '.join(self.names)}")
        changes = {"seed": command.seed, "duration": command.duration}
        given = {name: value for name, value in changes.items() if value is not None}
        file = load(command.scenario, given, self._trace if command.scenario == self._named else None)
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                return False
            self._stop.clear()
            self.state = {"status": "running"}
            self._thread = Thread(target=self._run, args=(file,), daemon=True)
            self._thread.start()
        return True

    def stop(self) -> None:
        """Ends the run that is going on, if any. Its report stays."""
        self._stop.set()

    def _run(self, file: ScenarioFile) -> None:
        results: dict[str, Any] = {}
        begun = self._looked = time.monotonic()
        try:
            for variant, scenario in file.variants.items():
                simulation = build(scenario, self._prices, file.folder)
                simulation.run(partial(self._look, file, results, variant, simulation, begun))
                results[variant] = result_of(simulation.outcome, scenario)
            verdicts = [
                judge(claim, {name: each["figures"] for name, each in results.items()}) for claim in file.claims
            ]
            report = report_of(file, self._prices, results, verdicts)
            self.state = {"status": "done", "text": f"done in {time.monotonic() - begun:.1f} s", "report": report}
        except (RunStopped, ValueError) as error:
            self.state = {**self.state, "status": "stopped", "text": str(error)}
        finally:
            if self.state["status"] == "running":
                self.state = {**self.state, "status": "stopped", "text": "the run has failed: the terminal shows why"}

    def _look(
        self,
        file: ScenarioFile,
        results: dict[str, Any],
        variant: str,
        simulation: Simulation,
        begun: float,
        seconds: float,
    ) -> None:
        """Makes the report so far, now and then. Raises RunStopped."""
        now, name = time.monotonic(), variant or file.name
        others = [each["figures"]["requests"] for key, each in results.items() if key != variant]
        count = sum(others) + len(simulation.outcome.requests)
        if self._stop.is_set():
            raise RunStopped(f"stopped at {seconds:,.1f} s of {name}")
        for value, most, what in ((count, MOST_REQUESTS, "requests"), (now - begun, MOST_SECONDS, "seconds")):
            if value > most:
                raise RunStopped(
                    f"{file.name} takes more than {most:,.0f} {what}, the limit of --serve, and was at "
                    f"{seconds:,.1f} s of {name}: give a shorter duration, or leave --serve out"
                )
        if now - self._looked >= LOOK_SECONDS:
            results[variant] = result_of(simulation.outcome, file.variants[variant])
            report = report_of(file, self._prices, results, ())
            text = f"{name}: {seconds:,.1f} s, {count:,} requests"
            self.state = {"status": "running", "text": text, "report": {**report, "variants": dict(results)}}
            self._looked = time.monotonic()


class LivePage(BaseHTTPRequestHandler):
    """Answers GET / (the page), GET /report (the report so far), POST /run and POST /stop."""

    protocol_version = "HTTP/1.1"
    timeout = READ_SECONDS
    runs: LiveRuns  # of the subclass that `serve_page` makes

    def do_GET(self) -> None:
        if self.path == "/report":
            self._answer(200, self.runs.state)
        elif self.path == "/":
            report = {"title": "Simulate traffic", "about": "", "live": self.runs.names}
            self._send(200, "text/html; charset=utf-8", page_of(report).encode())
        else:
            self._answer(404, {"error": f"there is no {self.path[:80]}: open /"})

    def do_POST(self) -> None:
        self.close_connection = True  # a body that is not read would be taken for the next request; `_send` says so
        # Other sites' pages cannot send this type without a preflight, which has no answer here.
        if self.headers.get("content-type") != "application/json":
            self._answer(415, {"error": "send content-type: application/json"})
        elif self.path == "/stop":
            self.runs.stop()
            self._answer(202, {})
        elif self.path == "/run":
            self._answer(*self._begin())
        else:
            self._answer(404, {"error": f"there is no {self.path[:80]}: post to /run or /stop"})

    def _begin(self) -> tuple[int, dict[str, Any]]:
        size = self.headers.get("content-length", "")
        if not size.isdecimal() or int(size) > MAX_BODY:
            return 413, {"error": f"the body has {size or 'no known number of'} bytes: send at most {MAX_BODY}"}
        try:
            begun = self.runs.begin(msgspec.json.decode(self.rfile.read(int(size)), type=Commanded))
        except (ValueError, msgspec.MsgspecError) as error:
            return 400, {"error": str(error)}
        return (202, {}) if begun else (409, {"error": "a simulation is going on: stop it first"})

    def _answer(self, status: int, value: Any) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in (("content-type", kind), ("content-length", str(len(body))), ("cache-control", "no-store")):
            self.send_header(name, value)
        if self.close_connection:  # else the client may send its next request while this connection closes
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Writes nothing for each request."""


def serve_page(
    scenario: str | None,
    seed: int | None,
    duration: float | None,
    trace: str | None,
    price_file: str | None,
    host: str,
    port: int,
) -> None:
    """Serves the page until Ctrl-C. A scenario of the command line runs at once. Raises AddressInUse, and ValueError
    for a wrong scenario."""
    if not host:
        raise ValueError("--host is '': it is empty; give a value, or leave it out")
    runs = LiveRuns(scenario, trace, load_prices(BOOK if price_file is None else Path(price_file)))
    with bind(host, port) as sock:
        if scenario is not None:
            runs.begin(Commanded(scenario, seed, duration))
        server = ThreadingHTTPServer((host, port), type("Page", (LivePage,), {"runs": runs}), bind_and_activate=False)
        server.socket.close()
        server.socket = sock
        listen(sock)
        print(f"open {url_of(sock)} in a browser; Ctrl-C ends this", flush=True)
        server.serve_forever()
