"""A Ray cluster of two nodes on this machine, each a process tree of its own, and engines on it.

    python -m tests.ray_cluster.session FOLDER...

The folders are checkpoints, one for each case. Prints a line for each thing that held; ends with an exception at the
first that did not. The network is a namespace of its own where the system allows that (see test_ray.py), so that
nothing listens anywhere else.
"""

import asyncio
import fcntl
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from penstock.config import EngineConfig
from penstock.config.memory import pool_bytes
from penstock.engine.child import die_at_end_of_input
from penstock.engine.client import StreamingClient
from penstock.engine.launch import launch
from penstock.families import load_spec, rank_facts
from penstock.messages import EngineError, GenerateRequest, SamplingParams
from tests.engine.processes import alive
from tests.engine.simulated import ask
from tests.models.serving import make_runner
from tests.runtime.mesh.test_parallel import Served, compare, requests, serve


class Case(NamedTuple):
    variant: str
    split: dict[str, Any]
    fault: signal.Signals | None = None  # what befalls a rank in the end


CASES = [  # with two threads a rank has a node to itself; of four ranks, two are on each, so that stages are apart
    Case("llama2", {"tensor_parallel_size": 2, "threads": 2}),
    Case("qwen3", {"pipeline_parallel_size": 2, "threads": 2}),
    Case("gemma3", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, signal.SIGKILL),
    Case("qwen2_moe_normed", {"tensor_parallel_size": 2, "expert_parallel": True, "threads": 2}, signal.SIGSTOP),
]
POOL_TOKENS = 128  # room for the longest request, and little more
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def loopback_up() -> None:
    """In a new network namespace it is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sH22x", b"lo", 0)
        flags = struct.unpack("16sH22x", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request))[1]
        if not flags & IFF_UP:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", flags | IFF_UP))


@contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """Two nodes with room for two threads each. They end with this block, and with whoever holds the other end of our
    standard input."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--num-cpus=2", "--object-store-memory=80000000", "--include-log-monitor=false"]
    head = ["--head", f"--port={port}", "--include-dashboard=false", "--no-monitor", f"--temp-dir={folder}"]
    nodes: list[subprocess.Popen[bytes]] = []

    def stop() -> None:
        for node in reversed(nodes):
            node.terminate()

    die_at_end_of_input(stop)
    try:
        for arguments in (head, [f"--address=127.0.0.1:{port}"]):
            log = (folder / f"node{len(nodes)}.log").open("wb")
            nodes.append(subprocess.Popen([*command, *arguments], stdout=log, stderr=log, start_new_session=True))
            deadline = time.monotonic() + 90
            while b"Ray runtime started" not in (folder / f"node{len(nodes) - 1}.log").read_bytes():
                if nodes[-1].poll() is not None or time.monotonic() > deadline:
                    raise AssertionError((folder / f"node{len(nodes) - 1}.log").read_text())
                time.sleep(0.1)
        os.environ["RAY_ADDRESS"] = f"127.0.0.1:{port}"
        yield
    finally:
        stop()
        for node in nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def config(model: Path, **changes: Any) -> EngineConfig:
    """With a budget that some prompts exceed."""
    fixed = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 40, "threads": 1, **changes}
    return EngineConfig(model=str(model), name="ray", dtype="float32", **fixed)


def pool(folder: Path, split: dict[str, Any]) -> int:
    """Bytes that hold POOL_TOKENS on the rank with the most layers."""
    whole = config(folder, **split)
    return max(pool_bytes(facts, whole, POOL_TOKENS) for facts in rank_facts(load_spec(folder), whole.split, 1))


async def served(client: StreamingClient, *waves: list[GenerateRequest]) -> Served:
    """The last wave's, as `serve` gives it."""
    for wave in waves:
        given = await asyncio.gather(*(ask(client, request) for request in wave))
        answers = {request.request_id: answer for request, answer in zip(wave, given, strict=True)}
    stats = client.stats()
    return Served(
        {name: answer.choices[0] for name, answer in answers.items()},
        {name: b"".join(delta.prompt_logprobs for delta in answer.deltas) for name, answer in answers.items()},
        {name: answer.logprobs[0] for name, answer in answers.items()},
        stats.prefix_hits,
        stats.preemptions,
    )


def ranks() -> list[int]:
    """The processes of ranks, whoever started them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"penstock.engine.ranks.worker" in arguments and any(a.startswith(b"tcp://") for a in arguments):
            found.append(int(folder.name))
    return found


async def told_of(fault: signal.Signals, client: StreamingClient) -> None:
    long = SamplingParams(seed=0, max_tokens=100, temperature=0.0, ignore_eos=True)
    wave = [GenerateRequest(request_id=f"f{i}", prompt_ids=(20 + i,), sampling=long) for i in range(6)]
    streams = [asyncio.create_task(ask(client, request)) for request in wave]
    steps = client.stats().steps
    while client.stats().steps < steps + 3:
        await asyncio.sleep(0.01)
    victim = ranks()[1]
    os.kill(victim, fault)
    ends = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30)
    reasons = {str(end) for end in ends if isinstance(end, EngineError)}
    assert reasons and all(f"(pid {victim} on " in reason for reason in reasons), ends
    assert client.state.status == "ended"


async def shown(case: Case, folder: Path) -> None:
    """That several ranks are one: in chunks, with prefixes found, with preemption; and what is said when one dies."""
    one = serve(make_runner(folder), requests())
    small = config(
        folder, distributed_executor="ray", step_deadline=8.0, kv_cache_bytes=pool(folder, case.split), **case.split
    )
    client = await launch(small)
    try:
        several = await served(client, requests("warm-"), requests())
        assert several.hits and several.preemptions, several[3:]
        compare(case.variant, one, several)
        print(
            f"{case.variant}, {case.split}: {several.hits} tokens found, {several.preemptions} preempted; as one rank"
        )
        if case.fault is not None:
            await told_of(case.fault, client)
            print(f"{case.fault.name}: every stream says which rank")
    finally:
        await client.close()


async def session(folders: list[Path]) -> None:
    for case, folder in zip(CASES, folders, strict=True):
        await shown(case, folder)
    end = time.monotonic() + 10
    while any(map(alive, ranks())):
        assert time.monotonic() < end, f"ranks are left: {ranks()}"
        await asyncio.sleep(0.1)
    print("no rank is left")


if __name__ == "__main__":
    loopback_up()
    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(Path(folder)):
        asyncio.run(session([Path(argument) for argument in sys.argv[1:]]))
