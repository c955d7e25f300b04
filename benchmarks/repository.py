"""Measures one-shot models in a repository, in turns with MLServer: two products with matrices of 1,024 x 1,024.

    python benchmarks/repository.py --peers ENV --json benchmarks/results/amx/repository.json --plot batching.png

ENV is a virtual environment with tritonclient[grpc], mlserver and onnxruntime. Servers and clients share this machine's
cores. Cases: `clients` flat out over gRPC with 1 and 16 clients, for Penstock and MLServer in turns; `floor`, beside
these, 16 clients of an empty service (peers/grpc_floor.py): what grpc.aio and the clients cost alone; `modes` compares
dynamic with static batching of 32 rows or 50 ms, at 10 requests a second and then flat out; `overhead` is the time of
one request in the server, less the run itself, as the server counts both; `pipelines` compares the throughput of two
pipelines with that of their slowest step, in turns; `supervisor` compares the latency of tensors over HTTP with one API
process and with two, in turns.
"""

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from results import parser, write
from servers import free_port

from penstock.observe.processes import usage
from tests.repository.onnx_files import FLOAT, INT64, matmuls, node, put, scale, weight
from tests.repository.onnx_files import model as onnx_model

HERE = Path(__file__).parent
SIZE = 1024
WARM_SECONDS = 1.0  # of triton_load.py
STATIC = "max-batch-size: 32\nbatching: {mode: static, max-wait: 0.05}\n"


def wait_until(url: str, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"{url} does not answer")


@contextlib.contextmanager
def running(command: list[str], ready: str, cwd: Path, log: Path) -> Iterator[int]:
    with log.open("wb") as sink:
        process = subprocess.Popen(command, cwd=cwd, stdout=sink, stderr=sink, start_new_session=True)
        try:
            wait_until(ready, process)
            yield process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@contextlib.contextmanager
def penstock(root: Path, *options: str, with_grpc: bool = True) -> Iterator[tuple[int, int, int]]:
    """A server: its HTTP port, its gRPC port and its process. `with_grpc` False: nothing answers at the gRPC port."""
    port, grpc = free_port(), free_port()
    command = [sys.executable, "-m", "penstock", "serve", "--repository", str(root), "--state-dir", "none"]
    command += ["--port", str(port), "--log-level", "warning", *(("--grpc-port", str(grpc)) if with_grpc else ())]
    command += options
    with running(command, f"http://127.0.0.1:{port}/readyz", HERE.parent, root.parent / "penstock.log") as pid:
        yield port, grpc, pid


@contextlib.contextmanager
def mlserver(python: Path, folder: Path, model: Path) -> Iterator[tuple[int, int]]:
    """The peer: its gRPC port and its process."""
    port, grpc, metrics = free_port(), free_port(), free_port()
    (folder / "settings.json").write_text(
        json.dumps(
            {"http_port": port, "grpc_port": grpc, "metrics_port": metrics, "debug": False, "parallel_workers": 0}
        )
    )
    (folder / "model-settings.json").write_text(
        json.dumps(
            {
                "name": "matmul",
                "implementation": "mlserver_onnx.OnnxRuntime",
                "max_batch_size": 32,
                "max_batch_time": 0.001,
                "parameters": {"uri": str(model), "version": "1"},
                "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, SIZE]}],
                "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, SIZE]}],
            }
        )
    )
    (folder / "mlserver_onnx.py").write_bytes((HERE / "peers/mlserver_onnx.py").read_bytes())
    command = [str(python.parent / "mlserver"), "start", "."]
    with running(command, f"http://127.0.0.1:{port}/v2/health/ready", folder, folder / "log") as pid:
        yield grpc, pid


Points = list[tuple[float, float]]  # of requests: when they were sent, in seconds, and their latency in ms


def load(python: Path, grpc: int, model: str, clients: int, seconds: float, rate: float = 0.0) -> dict[str, float]:
    """The rate, and percentiles of the latency."""
    return load_and_points(python, grpc, model, clients, seconds, rate)[0]


def load_and_points(
    python: Path, grpc: int, model: str, clients: int, seconds: float, rate: float = 0.0
) -> tuple[dict[str, float], Points]:
    command = [str(python), str(HERE / "peers/triton_load.py"), f"127.0.0.1:{grpc}", model, str(clients), str(seconds)]
    made = subprocess.run([*command, str(rate)], stdout=subprocess.PIPE, check=True, timeout=seconds + 120)
    found = json.loads(made.stdout.splitlines()[-1])
    points: Points = found.pop("points")
    return found, points


def load_of(python: Path, grpc: int, pid: int, clients: int, seconds: float) -> dict[str, float]:
    """What `load` returns, and the processor time of a request in the server's processes, in microseconds, which other
    work on the machine does not change much."""
    before = usage(pid)
    found = load(python, grpc, "matmul", clients, seconds)
    after = usage(pid)
    assert before is not None and after is not None
    requests = found["rate"] * (seconds + WARM_SECONDS)
    return {**found, "server_cpu_us": round((after[1] - before[1]) / requests * 1e6, 1)}


def floor(python: Path, seconds: float) -> dict[str, float]:
    """What `load_of` returns for 16 clients of an empty service."""
    port = free_port()
    command = [sys.executable, str(HERE / "peers/grpc_floor.py"), str(port), str(SIZE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"
            return load_of(python, port, server.pid, 16, seconds)
        finally:
            server.kill()


def counts(port: int, model: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/{model}/stats") as answer:
        found: dict[str, Any] = json.load(answer)["model_stats"][0]
    return found


def overhead(python: Path, port: int, grpc: int, seconds: float) -> float:
    """The mean microseconds of a request in the queue and between processes, with one client."""
    before = counts(port, "matmul")
    load(python, grpc, "matmul", 1, seconds)
    after = counts(port, "matmul")

    def mean(name: str) -> float:
        was, now = before["inference_stats"][name], after["inference_stats"][name]
        return float(now["ns"] - was["ns"]) / max(now["count"] - was["count"], 1) / 1000

    return mean("success") - mean("compute_infer")


def modes(python: Path, grpc: int, seconds: float, plot_file: Path | None) -> dict[str, dict[str, float]]:
    """Dynamic and static batching under the same trace: 10 requests a second, then 16 clients flat out."""
    found, traces = {}, dict[str, Points]()
    for model, kind in (("matmul", "dynamic"), ("static", "static")):
        off_peak, early = load_and_points(python, grpc, model, 1, seconds, 10.0)
        peak, late = load_and_points(python, grpc, model, 16, seconds)
        found[f"{kind} off-peak"], found[f"{kind} peak"] = off_peak, peak
        traces[kind] = early + [(at + seconds, latency) for at, latency in late]
    if plot_file is not None:
        plot(plot_file, traces, seconds)
    return found


def plot(file: Path, traces: dict[str, Points], seconds: float) -> None:
    """Draws the latency of each request, and the requests of each half second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 5))
    for kind, points in traces.items():
        at, latency = zip(*points, strict=True)
        above.scatter(at, latency, s=4, label=f"{kind} batching")
        counts, edges = np.histogram(at, bins=np.arange(0, 2 * seconds + 0.5, 0.5))
        below.step(edges[:-1], counts * 2, where="post", label=f"{kind} batching")
    above.set(ylabel="latency in ms", yscale="log", title="10 requests a second, then 16 clients flat out")
    below.set(ylabel="requests a second", xlabel="seconds")
    above.legend()
    figure.tight_layout()
    figure.savefig(file)


CHAIN = """
max-batch-size: 32
inputs: [{name: x, datatype: FP32, dims: [1024]}]
outputs: [{name: y, datatype: FP32, dims: [1024]}]
steps:
  - {model: before, inputs: {x: x}, outputs: {y: a}}
  - {model: matmul, inputs: {x: a}, outputs: {y: b}}
  - {model: after, inputs: {x: b}, outputs: {y: y}}
"""
ANSWERS = """
max-batch-size: 8
inputs: [{name: TEXT, datatype: BYTES, dims: [1]}, {name: HOW, datatype: BYTES, dims: [1], optional: true}]
outputs: [{name: ANSWER, datatype: BYTES, dims: [1]}, {name: CLASS, datatype: FP32, dims: [1]}]
steps:
  - {tokenize: writer, inputs: {text: TEXT}, outputs: {input_ids: ids, attention_mask: mask}}
  - model: writer
    inputs: {input_ids: ids, attention_mask: mask, sampling_parameters: HOW}
    outputs: {text_output: ANSWER}
  - {tokenize: writer, inputs: {text: ANSWER}, outputs: {input_ids: made}}
  - {model: classifier, inputs: {x: made}, outputs: {y: CLASS}}
"""
TOKENS, STREAMS = 48, 8


def sums() -> bytes:
    """A classifier of token ids in the size of a toy: y = the sum of a row."""
    nodes = [node("Cast", ["x"], ["f"], to=FLOAT), node("ReduceSum", ["f", "axes"], ["y"], keepdims=1)]
    inputs, outputs = [("x", INT64, ("n", "m"))], [("y", FLOAT, ("n", 1))]
    return onnx_model(nodes, inputs, outputs, [weight("axes", np.array([1], np.int64))])


def streams(port: int, path: str, body: dict[str, Any], seconds: float) -> float:
    """Answers a second of STREAMS clients, each of which reads one stream after the other."""
    end, done = time.monotonic() + seconds, 0

    def client(_: int) -> int:
        count = 0
        while time.monotonic() < end:
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert b"error" not in answer.read()
            count += 1
        return count

    began = time.monotonic()
    with ThreadPoolExecutor(STREAMS) as pool:
        done = sum(pool.map(client, range(STREAMS)))
    return done / (time.monotonic() - began)


def pipelines(python: Path, root: Path, seconds: float, turns: int) -> dict[str, Any]:
    """The throughput of a pipeline as a share of that of its slowest step."""
    for name, factor in (("before", 2.0), ("after", 0.5)):
        put(root, name, scale(factor, width=SIZE))
    put(root, "classifier", sums())
    for name, text in (("chain", CHAIN), ("answers", ANSWERS), ("writer", "model: smollm2-135m\n")):
        (root / name).mkdir()
        (root / name / "model.yaml").write_text(text)
    how = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    tensors = {"TEXT": "The river flows", "HOW": json.dumps(how)}
    shape = {"datatype": "BYTES", "shape": [1, 1]}
    pipeline = {"inputs": [{"name": name, **shape, "data": [text]} for name, text in tensors.items()]}
    found: dict[str, list[float]] = {"three ONNX models": [], "tokenise, generate, classify": []}
    with penstock(root) as (port, grpc, _):
        for _ in range(turns):
            alone, chained = (load(python, grpc, name, 16, seconds)["rate"] for name in ("matmul", "chain"))
            found["three ONNX models"].append(chained / alone)
            generate = {"text_input": tensors["TEXT"], "parameters": how}
            plain = streams(port, "/v2/models/writer/generate_stream", generate, seconds)
            whole = streams(port, "/v2/models/answers/infer_stream", pipeline, seconds)
            found["tokenise, generate, classify"].append(whole / plain)
            print(f"pipeline over step: {found}; {alone:.0f} rows a second, {plain:.2f} texts a second", flush=True)
    return {name: {"median": round(statistics.median(each), 3), "all": each} for name, each in found.items()}


def latency(port: int, model: str, width: int, seconds: float) -> float:
    """The median latency in milliseconds of a row over HTTP, as bytes."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, width], "parameters": {"binary_data_size": 4 * width}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body, headers = head + bytes(4 * width), {"Inference-Header-Content-Length": str(len(head))}
    connection, found = http.client.HTTPConnection("127.0.0.1", port), list[float]()
    end = time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        connection.request("POST", f"/v2/models/{model}/infer", body, headers)
        answer = connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise SystemExit(f"a request failed: {data!r}")
        found.append((time.monotonic() - began) * 1000)
    connection.close()
    return statistics.median(found)


def supervisor(seconds: float, turns: int) -> dict[str, list[float]]:
    """The median latencies in milliseconds of 4 and 128 KiB there and back, with one and two API processes."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "models")
        widths = {"4 KiB": 1 << 10, "128 KiB": 1 << 15}
        for width in widths.values():
            put(root, f"w{width}", scale(2.0, width=width))
        for _ in range(turns):
            for processes in ("1", "2"):
                with penstock(root, "--api-processes", processes, with_grpc=False) as (port, _, _):
                    for size, width in widths.items():
                        made = latency(port, f"w{width}", width, seconds)
                        found.setdefault(f"{size}, {processes} processes", []).append(round(made, 3))
            print(f"medians in ms: {found}", flush=True)
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--peers", type=Path, required=True, help="environment with tritonclient and mlserver")
    options.add_argument("--seconds", type=float, default=6.0)
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--cases", default="clients,floor,modes,overhead,pipelines,supervisor")
    options.add_argument("--plot", type=Path, help="draw dynamic and static batching into this file")
    given = options.parse_args()
    python = given.peers.absolute() / "bin/python"
    cases, result = given.cases.split(","), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        root, peer = Path(folder, "models"), Path(folder, "mlserver")
        peer.mkdir()
        model = put(root, "matmul", matmuls(SIZE)) / "model.onnx"
        put(root, "static", matmuls(SIZE), settings=STATIC)
        if "clients" in cases:
            found: dict[str, list[dict[str, float]]] = {}
            for turn in range(given.turns):
                with penstock(root) as (_, grpc, pid):
                    for clients in (1, 16):
                        made = load_of(python, grpc, pid, clients, given.seconds)
                        found.setdefault(f"penstock {clients}", []).append(made)
                with mlserver(python, peer, model) as (grpc, pid):
                    for clients in (1, 16):
                        made = load_of(python, grpc, pid, clients, given.seconds)
                        found.setdefault(f"mlserver {clients}", []).append(made)
                if "floor" in cases:
                    found.setdefault("floor 16", []).append(floor(python, given.seconds))
                print(f"turn {turn + 1}: " + ", ".join(f"{name} {runs[-1]}" for name, runs in found.items()))
            result["clients"] = {
                name: {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}
                for name, runs in found.items()
            }
        with penstock(root) as (port, grpc, _):
            if "overhead" in cases:
                result["overhead_us"] = round(overhead(python, port, grpc, given.seconds), 1)
            if "modes" in cases:
                result["modes"] = modes(python, grpc, given.seconds, given.plot)
    if "pipelines" in cases:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "models")
            put(root, "matmul", matmuls(SIZE))
            result["pipelines"] = pipelines(python, root, given.seconds, given.turns)
    if "supervisor" in cases:
        result["supervisor_ms"] = supervisor(given.seconds, given.turns)
    write(result, given.json, peers={"mlserver": "1.7.1"})


if __name__ == "__main__":
    main()
