"""Counts the Python instructions that requests cost the API process and the engine, in two source trees.

    git worktree add ../before COMMIT && PYTHONPATH=../before/src python ../before/src/penstock/kernels/native/build.py
    python benchmarks/bytecodes.py ../before/src src --model MODEL \
        --new-flags "--speculation off --generation-config none"

Each tree serves the same model and gets the same greedy requests, one at a time. Every bytecode that the main threads
execute meanwhile is counted, so the figures hardly vary and do not depend on other programs. Work in native code is not
counted. Timers run by the clock, so what an idle server executes in the same time is subtracted; `idle` has it per
second. `--new-flags` turns off what the older tree did not have: give both the same defaults for sampling.

"decode, N sequences" is per decode step: a request with N choices is sent with two limits of tokens, and the difference
of the counts is divided by the difference of the limits. While it counts, the API process is too slow to read each
token by itself and merges some, in numbers that depend on time: its figures for many sequences vary by a few percent.
"""

import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

from results import commit_of, parser, write

COUNTS = "BYTECODES_FOLDER"  # environment variable: where processes write what they have counted
TOKENS = 32
SEQUENCES = (1, 8, 32)  # of the decode steps that are counted
STEPS = 64  # by which the longer one of two requests is longer
PAUSE = 1.3  # seconds until a process acts on a signal: an idle engine wakes once a second
CHAT = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "The sky is", "temperature": 0.0}),
    "chat": ("/v1/chat/completions", CHAT),
    "chat streamed": ("/v1/chat/completions", {**CHAT, "stream": True}),
}


Counts = dict[str, Counter[str]]  # of processes, by function

# -- in the processes that are measured -------------------------------------------------------------------------------


def install() -> None:
    """Begin to count at a first SIGUSR2, and write the count to a file at the next."""
    counts: dict[Any, list[int]] = {}  # by code object
    counting = False

    def enter(frame: Any, event: str, argument: Any) -> Any:
        if not counting:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count = counts.setdefault(frame.f_code, [0])

        def trace(frame: Any, event: str, argument: Any) -> Any:
            if event == "opcode":
                count[0] += 1
            return trace

        return trace

    def toggle(number: int, frame: Any) -> None:
        nonlocal counting
        counting = not counting
        sys.settrace(enter if counting else None)
        while counting and frame is not None:  # what runs already, such as the engine's loop
            frame.f_trace = enter(frame, "call", None)
            frame = frame.f_back
        if not counting:
            functions: Counter[str] = Counter()
            for code, count in counts.items():
                functions[f"{'/'.join(code.co_filename.split('/')[-2:])} {code.co_qualname}"] += count[0]
            counts.clear()
            target = Path(os.environ[COUNTS]) / str(os.getpid())
            target.with_suffix(".part").write_text(json.dumps(functions))
            target.with_suffix(".part").rename(target)

    threading.settrace(enter)  # of threads that begin from now on
    signal.signal(signal.SIGUSR2, toggle)


# -- in the process that measures --------------------------------------------------------------------------------------


class Served:
    """A tree's server, and the process of its engine."""

    def __init__(self, source: Path, model: list[str], flags: list[str], folder: Path) -> None:
        (folder / "sitecustomize.py").write_text(
            f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\nimport bytecodes\nbytecodes.install()\n"
        )
        (folder / "counts").mkdir()
        self._counts = folder / "counts"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{free.getsockname()[1]}"
        paths = (folder, source, Path(__file__).parents[1] / "src")  # the last one for what this file imports
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), COUNTS: str(self._counts)}
        command = [sys.executable, "-m", "penstock", "serve", *model, "--port", self._url.rpartition(":")[2], *flags]
        from servers import start  # imported here: the server imports this file too

        self._process = start(command, env=environment, stderr=(folder / "log").open("wb"))
        self._log = folder / "log"
        self._wait_until_ready()
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        self._processes = {"api": self._process.pid, "engine": int(children[0])}
        self._model = self._get("/v1/models")["data"][0]["id"]

    def count(self, case: str | None, requests: int, seconds: float = 0.0, **more: int) -> tuple[Counts, float]:
        """What each process executes by function for so many requests, or in so many seconds without; the seconds.
        `more`: fields of the requests."""
        self._toggle()
        began = time.monotonic()
        for _ in range(requests if case else 0):
            path, fields = CASES[case or ""]
            body = {"model": self._model, "max_tokens": TOKENS, "ignore_eos": True, **fields, **more}
            self._get(path, json.dumps(body).encode())
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        self._toggle()
        return {name: self._read(pid) for name, pid in self._processes.items()}, elapsed

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _toggle(self) -> None:
        for pid in self._processes.values():
            os.kill(pid, signal.SIGUSR2)
        time.sleep(PAUSE)

    def _read(self, pid: int) -> Counter[str]:
        file, end = self._counts / str(pid), time.monotonic() + 20
        while not file.exists():
            if time.monotonic() > end:
                raise RuntimeError(f"process {pid} has not written its count")
            time.sleep(0.05)
        count = Counter(json.loads(file.read_text()))
        file.unlink()
        return count

    def _get(self, path: str, body: bytes | None = None) -> Any:
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            data = answer.read()
        return json.loads(data) if data.startswith(b"{") else None

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end and self._process.poll() is None:
            try:
                self._get("/v1/models")
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError(f"the server did not start: {self._log.read_text()[-2000:]}")


def measure(source: Path, model: list[str], flags: list[str], requests: int) -> dict[str, Counts]:
    """Bytecodes of one tree by process and function: per second without requests, per request of each case, and per
    decode step of several sequences."""
    with tempfile.TemporaryDirectory() as folder:
        served = Served(source.resolve(), model, flags, Path(folder))
        try:
            for case in CASES:
                served.count(case, 2)  # caches are filled, modules imported
            counts, seconds = served.count(None, 0, 5.0)
            idle = {name: _scaled(count, 1 / (seconds + PAUSE)) for name, count in counts.items()}
            found: dict[str, Counts] = {"idle": idle}

            def busy(case: str, **more: int) -> Counts:
                """What each process executes for a request, without what it does by the clock."""
                counts, seconds = served.count(case, requests, **more)
                print(f"{source}: {requests} of {case} {more or ''} in {seconds:.1f} s", file=sys.stderr, flush=True)
                for name, count in counts.items():
                    count.subtract(_scaled(idle[name], seconds + PAUSE))
                return {name: _scaled(count, 1 / requests) for name, count in counts.items()}

            found |= {case: busy(case) for case in CASES}
            for n in SEQUENCES:
                short, long = busy("completion", n=n), busy("completion", n=n, max_tokens=TOKENS + STEPS)
                for name, count in long.items():
                    count.subtract(short[name])
                found[f"decode, {n} sequence{'s' * (n > 1)}"] = {
                    name: _scaled(count, 1 / STEPS) for name, count in long.items()
                }
            return found
        finally:
            served.close()


def _scaled(counts: Counter[str], factor: float) -> Counter[str]:
    return Counter({name: count * factor for name, count in counts.items()})


def _changed(old: Counter[str], new: Counter[str], count: int) -> list[str]:
    changes = sorted(((new[name] - old[name], name) for name in old | new), key=lambda change: -abs(change[0]))
    return [f"{change:+.0f} {name}" for change, name in changes[:count]]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("old", type=Path, help="folder with the package penstock, with its native library")
    arguments.add_argument("new", type=Path)
    arguments.add_argument("--model", required=True, help="a folder or a GGUF file")
    arguments.add_argument("--flags", default="--threads 1 --kv-cache-memory 256MiB", help="of both servers")
    arguments.add_argument("--new-flags", default="", help="of the new tree's server alone")
    arguments.add_argument("--requests", type=int, default=10)
    arguments.add_argument("--functions", type=int, default=8, help="that changed most, to show")
    args = arguments.parse_args()
    trees = {}
    for name, source, more in (("old", args.old, ""), ("new", args.new, args.new_flags)):
        trees[name] = measure(source, [args.model], shlex.split(args.flags) + shlex.split(more), args.requests)
    rows = []
    for case, processes in trees["old"].items():
        for process, counts in processes.items():
            after = trees["new"][case][process]
            old, new = counts.total(), after.total()
            row = {"case": case, "process": process, "old": round(old), "new": round(new), "ratio": round(new / old, 3)}
            rows.append(row | {"changed": _changed(counts, after, args.functions)})
    commits = {"old": commit_of(args.old), "new": commit_of(args.new)}
    result = {"benchmark": "bytecodes", "trees": commits, "model": Path(args.model).name, "new_flags": args.new_flags}
    write({**result, "tokens": TOKENS, "requests": args.requests, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
