"""Measures one-shot models of two source trees in turns, beside MLServer and beside a process for each model.

    git worktree add ../before COMMIT
    python benchmarks/repository_turns.py ../before --peers ENV --json repository_turns.json

All servers run all the time, and one after the other gets requests, in an order that changes with each turn. Cases:
`clients`, 16 clients of two products with 1,024 x 1,024 over gRPC; `chain`, the same of three ONNX models in a row as a
share of their slowest step alone; `many`, 50 small models under Zipf's law with bursts over HTTP. ENV is as in
benchmarks/repository.py, whose servers and clients these are.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import repository_life as life
from results import commit_of, parser, write

import repository as one
from tests.repository.onnx_files import matmuls, put, scale

Runs = dict[str, list[dict[str, float]]]


@contextlib.contextmanager
def source(tree: Path) -> Iterator[None]:
    """Servers that start in the block are those of a tree."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree / "src"), before])
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def in_turns(turns: int, what: dict[str, Callable[[], dict[str, float]]]) -> Runs:
    found: Runs = {name: [] for name in what}
    for turn in range(turns):
        for name in what if turn % 2 == 0 else reversed(what):
            found[name].append(what[name]())
            print(f"turn {turn + 1}, {name}: {found[name][-1]}", flush=True)
    return found


def clients_and_chain(trees: dict[str, Path], peers: Path, seconds: float, turns: int) -> dict[str, Runs]:
    python = peers / "bin/python"
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        peer, flat, chains = Path(folder, "mlserver"), dict[str, Any](), dict[str, Any]()
        peer.mkdir()
        for name, tree in trees.items():
            root = Path(folder, name, "models")
            model = put(root, "matmul", matmuls(one.SIZE)) / "model.onnx"
            for step, factor in (("before", 2.0), ("after", 0.5)):
                put(root, step, scale(factor, width=one.SIZE))
            (root / "chain").mkdir()
            (root / "chain/model.yaml").write_text(one.CHAIN)
            with source(tree):
                _, grpc, pid = running.enter_context(one.penstock(root))

            def share(grpc: int = grpc) -> dict[str, float]:
                step, chain = (one.load(python, grpc, model, 16, seconds)["rate"] for model in ("matmul", "chain"))
                return {"step": step, "chain": chain, "share": round(chain / step, 3)}

            flat[name] = lambda grpc=grpc, pid=pid: one.load_of(python, grpc, pid, 16, seconds)
            chains[name] = share
        grpc, pid = running.enter_context(one.mlserver(python, peer, model))
        flat["mlserver"] = lambda grpc=grpc, pid=pid: one.load_of(python, grpc, pid, 16, seconds)
        return {"clients": in_turns(turns, flat), "chain": in_turns(turns, chains)}


def many(trees: dict[str, Path], seconds: float, turns: int) -> Runs:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as running:
        root, names, loads = Path(folder, "models"), [f"m{number}" for number in range(50)], dict[str, Any]()
        for number, name in enumerate(names):
            put(root, name, matmuls(life.WIDTH, seed=number))
        kinds = {name: (tree, life.one_server) for name, tree in trees.items()}
        for kind, (tree, servers) in (kinds | {"50 processes": (Path(), life.processes_of_one)}).items():
            with source(tree):
                pids, ports, send = running.enter_context(servers(root, names))

            def load(pids: list[int] = pids, ports: dict[str, int] = ports, send: life.Send = send) -> dict[str, float]:
                latencies = life.zipf_load(names, ports, send, seconds)
                p50, p99 = (round(float(each) * 1000, 2) for each in np.percentile(latencies, [50, 99]))
                return {"requests": len(latencies), "p50_ms": p50, "p99_ms": p99, **life.usage(pids)}

            loads[kind] = load
        return in_turns(turns, loads)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("before", type=Path, help="the other source tree")
    options.add_argument("--peers", type=Path, required=True, help="environment with tritonclient and mlserver")
    options.add_argument("--seconds", type=float, default=1.5, help="of a run over gRPC; three times as many over HTTP")
    options.add_argument("--turns", type=int, default=6)
    given = options.parse_args()
    trees = {"before": given.before.absolute(), "penstock": Path(__file__).absolute().parents[1]}
    result: dict[str, Any] = {"before": commit_of(given.before)}
    result |= clients_and_chain(trees, given.peers.absolute(), given.seconds, given.turns)
    result["many"] = many(trees, 3 * given.seconds, given.turns)
    cases = ("clients", "rate"), ("chain", "share"), ("many", "p99_ms")
    result["medians"] = {
        case: {name: round(statistics.median(run[key] for run in runs), 3) for name, runs in result[case].items()}
        for case, key in cases
    }
    write(result, given.json, peers={"mlserver": "1.7.1"})


if __name__ == "__main__":
    main()
