"""A Ray cluster of two nodes on this machine, each a process tree of its own, and engines on it.

    python -m tests.ray_cluster.session MIXTURE

MIXTURE is the folder of a small mixture of experts. Prints a line for each thing that held; ends with an exception at
the first that did not. The network is a namespace of its own where the system allows that (see test_ray.py), so that
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

import msgspec

import penstock
from penstock.config import EngineConfig
from penstock.engine import StreamingClient, launch
from penstock.messages import EngineError, GenerateRequest, SamplingParams
from tests.engine.processes import alive
from tests.engine.simulated import Answer, ask

MODEL = Path(penstock.__file__).parent / "assets" / "python-8m"
PROMPTS = [(5, 9, 300, 17), tuple(range(40, 140)), (256,)]
SPLITS: list[dict[str, object]] = [  # two of four ranks on each node, so that stages are apart; one of two
    {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    {"tensor_parallel_size": 2, "expert_parallel": True, "threads": 2},
]
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
    """Two nodes with room for two threads each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--num-cpus=2", "--object-store-memory=80000000"]
    head = ["--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={folder}"]
    nodes = []
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
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()


def config(model: Path = MODEL, **changes: object) -> EngineConfig:
    fixed = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": 16 << 20}
    return EngineConfig(model=str(model), name="ray", dtype="float32", **{"threads": 1, **fixed, **changes})


def requests(output: int = 24) -> list[GenerateRequest]:
    greedy = SamplingParams(seed=0, max_tokens=output, temperature=0.0, logprobs=2, ignore_eos=True)
    sampled = msgspec.structs.replace(greedy, seed=7, temperature=0.9, logprobs=None)
    return [
        GenerateRequest(request_id=f"r{i}{j}", prompt_ids=ids, sampling=sampling)
        for i, ids in enumerate(PROMPTS)
        for j, sampling in enumerate((greedy, sampled))
    ]


async def answers(client: StreamingClient) -> list[Answer]:
    return list(await asyncio.gather(*(ask(client, request) for request in requests())))


def ranks() -> list[int]:
    """The processes of ranks, whoever started them."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"penstock.engine.worker" in arguments and any(a.startswith(b"tcp://") for a in arguments):
            found.append(int(folder.name))
    return found


async def one_rank(model: Path) -> list[Answer]:
    client = await launch(config(model), in_process=True)
    try:
        return await answers(client)
    finally:
        await client.close()


async def same_tokens(client: StreamingClient, model: Path) -> None:
    given, expected = await answers(client), await one_rank(model)
    assert [a.choices for a in given] == [a.choices for a in expected]


async def told_of(fault: signal.Signals, client: StreamingClient) -> None:
    streams = [asyncio.create_task(ask(client, request)) for request in requests(output=140)]
    steps = client.stats().steps
    while client.stats().steps < steps + 3:
        await asyncio.sleep(0.01)
    victim = ranks()[1]
    os.kill(victim, fault)
    ends = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 30)
    reasons = {str(end) for end in ends if isinstance(end, EngineError)}
    assert reasons and all(f"(pid {victim} on " in reason for reason in reasons), ends
    assert not client.healthy


async def session(mixture: Path) -> None:
    for model, split, fault in zip((MODEL, mixture), SPLITS, (signal.SIGKILL, signal.SIGSTOP), strict=True):
        client = await launch(config(model, distributed_executor="ray", step_deadline=8.0, **split))
        try:
            await same_tokens(client, model)
            print(f"{split}: the tokens are those of one rank")
            await told_of(fault, client)
            print(f"{fault.name}: every stream says which rank")
        finally:
            await client.close()
    end = time.monotonic() + 10
    while any(map(alive, ranks())):
        assert time.monotonic() < end, f"ranks are left: {ranks()}"
        await asyncio.sleep(0.1)
    print("no rank is left")


if __name__ == "__main__":
    loopback_up()
    with tempfile.TemporaryDirectory(prefix="ray") as folder, cluster(Path(folder)):
        asyncio.run(session(Path(sys.argv[1])))
