"""Measures what loading and unloading does to a server with a repository: memory, descriptors, threads, latencies.

    python benchmarks/repository_life.py --json benchmarks/results/amx/repository_life.json

Cases: `cycles` loads and unloads a model N times, every tenth time one that fails, and samples the resident memory and
the descriptors of all processes; `many` serves 50 small models under Zipf's law with bursts, in turns with 50 processes
that serve one each (benchmarks/peers/onnx_process.py), and counts memory and threads; `swap` exchanges a version of
500 MB on an idle server and while clients are flat out, and counts failed requests.
"""

import contextlib
import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from results import parser, write
from servers import free_port

from repository import penstock, wait_until
from tests.repository.onnx_files import FLOAT, matmuls, model, node, put, scale, weight

WIDTH = 256  # of the small models


def post(port: int, path: str, body: dict[str, Any]) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.read()
        return int(error.code)


def infer(port: int, name: str, width: int) -> int:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, width], "data": [1.0] * width}
    return post(port, f"/v2/models/{name}/infer", {"inputs": [tensor]})


def change(port: int, name: str, what: str) -> int:
    return post(port, f"/v2/repository/models/{name}/{what}", {})


def processes(port: int) -> list[int]:
    """The server that listens on a port, found by its command line, and its children."""
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                command = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(port).encode() in command:
                children = Path(f"/proc/{entry}/task/{entry}/children").read_text().split()
                return [int(entry), *map(int, children)]
    raise SystemExit("the server is not there")


def usage(pids: list[int]) -> dict[str, float]:
    """The memory of processes, of which pages that several have count once, and their descriptors and threads."""

    def memory(pid: int) -> float:
        rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return float(next(row for row in rows if row.startswith("Pss:")).split()[1]) / 1024

    return {
        "memory_mb": round(sum(map(memory, pids)), 2),
        "descriptors": sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
        "threads": sum(len(os.listdir(f"/proc/{pid}/task")) for pid in pids),
    }


def cycles(root: Path, count: int) -> dict[str, Any]:
    put(root, "stays", scale(2))
    put(root, "comes", matmuls(512))
    put(root, "broken", b"no model")
    samples = []
    with penstock(root) as (port, _, _):
        for number in range(count):
            assert change(port, "comes", "load") == 200
            assert infer(port, "comes", 512) == 200
            if number % 10 == 0:
                assert change(port, "broken", "load") == 400
            assert change(port, "comes", "unload") == 200
            if number % (count // 10) == count // 10 - 1:
                samples.append(usage(processes(port)))
                print(f"{number + 1} cycles: {samples[-1]}", flush=True)
    first, last = samples[1], samples[-1]  # after the warm-up
    return {"cycles": count, "samples": samples, "growth": round(last["memory_mb"] / first["memory_mb"] - 1, 4)}


Send = Callable[[http.client.HTTPConnection, str], int]  # sends a request for a model, and returns the status


@contextlib.contextmanager
def one_server(root: Path, names: list[str]) -> Iterator[tuple[list[int], dict[str, int], Send]]:
    """Penstock with all models: its processes, the port of each model, and what sends a request."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, WIDTH], "parameters": {"binary_data_size": 4 * WIDTH}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body, headers = head + bytes(4 * WIDTH), {"Inference-Header-Content-Length": str(len(head))}

    def send(connection: http.client.HTTPConnection, name: str) -> int:
        connection.request("POST", f"/v2/models/{name}/infer", body, headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status

    with penstock(root, with_grpc=False) as (port, _, _):  # the 50 processes have HTTP alone, too
        yield processes(port), dict.fromkeys(names, port), send


@contextlib.contextmanager
def processes_of_one(root: Path, names: list[str]) -> Iterator[tuple[list[int], dict[str, int], Send]]:
    """The peer: a process for each model."""

    def send(connection: http.client.HTTPConnection, name: str) -> int:
        connection.request("POST", "/", bytes(4 * WIDTH))
        answer = connection.getresponse()
        answer.read()
        return answer.status

    ports = {name: free_port() for name in names}
    script = Path(__file__).parent / "peers/onnx_process.py"
    running = [
        subprocess.Popen([sys.executable, str(script), str(port), str(root / name / "1/model.onnx")])
        for name, port in ports.items()
    ]
    try:
        for process, port in zip(running, ports.values(), strict=True):
            wait_until(f"http://127.0.0.1:{port}", process)
        yield [process.pid for process in running], ports, send
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def zipf_load(names: list[str], ports: dict[str, int], send: Send, seconds: float) -> list[float]:
    """The latencies of 8 clients, which choose models by Zipf's law and send bursts."""
    weights = [1 / (place + 1) for place in range(len(names))]
    end = time.monotonic() + seconds

    def client(seed: int) -> list[float]:
        choose, latencies = random.Random(seed), []
        connections = {name: http.client.HTTPConnection("127.0.0.1", ports[name]) for name in names}
        while time.monotonic() < end:
            (name,) = choose.choices(names, weights)
            for _ in range(choose.choice((1, 1, 8))):
                began = time.monotonic()
                assert send(connections[name], name) == 200
                latencies.append(time.monotonic() - began)
            time.sleep(choose.expovariate(50))
        for connection in connections.values():
            connection.close()
        return latencies

    with ThreadPoolExecutor(8) as pool:
        return [latency for found in pool.map(client, range(8)) for latency in found]


def many(root: Path, seconds: float, turns: int) -> dict[str, Any]:
    names = [f"m{number}" for number in range(50)]
    for number, name in enumerate(names):
        put(root, name, matmuls(WIDTH, seed=number))
    found: dict[str, Any] = {"cores": os.cpu_count()}
    for turn in range(turns):
        for kind, servers in (("one server", one_server), ("50 processes", processes_of_one)):
            with servers(root, names) as (pids, ports, send):
                latencies = zipf_load(names, ports, send, seconds)
                used = usage(pids)
            p50, p99 = (round(float(each) * 1000, 2) for each in np.percentile(latencies, [50, 99]))
            made = {"requests": len(latencies), "p50_ms": p50, "p99_ms": p99, **used}
            found.setdefault(kind, []).append(made)
            print(f"turn {turn + 1}, {kind}: {made}", flush=True)
    return found


def swap(root: Path) -> dict[str, Any]:
    def large(version: int) -> bytes:
        big = np.full((125, 2**20), version, np.float32)  # 500 MB, of which the model uses a row
        nodes = [node("Gather", ["big", "zero"], ["row"]), node("Slice", ["row", "a", "b", "one"], ["f"])]
        nodes += [node("Mul", ["x", "f"], ["y"])]
        small = {"zero": 0, "a": [0], "b": [1], "one": [0]}
        weights = [weight("big", big), *(weight(name, np.array(value, np.int64)) for name, value in small.items())]
        return model(nodes, [("x", FLOAT, ("n", WIDTH))], [("y", FLOAT, ("n", WIDTH))], weights)

    put(root, "large", large(1))
    statuses: list[tuple[float, float, int]] = []
    stop = threading.Event()
    with penstock(root) as (port, _, _):
        put(root, "large", large(2), 2)
        began = time.monotonic()
        assert change(port, "large", "load") == 200
        idle = time.monotonic() - began
        put(root, "large", large(3), 3)

        def client() -> None:
            while not stop.is_set():
                began = time.monotonic()
                status = infer(port, "large", WIDTH)
                statuses.append((began, time.monotonic() - began, status))

        with ThreadPoolExecutor(16) as pool:
            for _ in range(16):
                pool.submit(client)
            time.sleep(30)
            began = time.monotonic()
            assert change(port, "large", "load") == 200
            took = time.monotonic() - began
            time.sleep(15)
            stop.set()
    before = [latency for at, latency, _ in statuses if at < began - 15]
    around = [latency for at, latency, _ in statuses if at >= began - 15]
    return {
        "load_seconds_idle": round(idle, 2),
        "load_seconds_under_load": round(took, 2),
        "requests": len(statuses),
        "failed": sum(status != 200 for _, _, status in statuses),
        "p99_ratio": round(float(np.percentile(around, 99) / np.percentile(before, 99)), 2),
        "median_ms": round(statistics.median(before) * 1000, 2),
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", default="cycles,many,swap")
    options.add_argument("--count", type=int, default=1000, help="load and unload cycles")
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--turns", type=int, default=3, help="of the server and the 50 processes")
    given = options.parse_args()
    runs: dict[str, Callable[[Path], dict[str, Any]]] = {
        "cycles": lambda root: cycles(root, given.count),
        "many": lambda root: many(root, given.seconds, given.turns),
        "swap": swap,
    }
    result = {}
    for name in given.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            result[name] = runs[name](Path(folder, "models"))
    write(result, given.json)


if __name__ == "__main__":
    main()
