"""Measures what streaming costs the API process: its CPU time for a token of each wire.

    python benchmarks/streaming.py --json benchmarks/results/avx512/streaming.json

A simulated engine, in a process of its own behind the real link, gives each of the streams a token at a fixed pace.
The tokens are those of a text, and the tokenizer is the default model's. The clients are in this process. CPU time is
that of all threads of the API process, as the kernel counts it. `core_share` is the part of one core that the streams
take at the pace if every token is an event; on a busy machine an event may have several. With --api-processes N, the
time is that of the supervisor and of the N processes together, and `cores` has the part of a core that each one took.
"""

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from results import parser, write
from servers import free_port

from penstock.engine.child import die_with_parent

TEXT = (
    "The river rises in the hills, where the snow of the winter melts late. For the first 20 miles it runs through "
    "woods of oak and beech; then the valley opens, and there are fields — wheat, barley, some vines — on both sides. "
    "def flow(width: float, depth: float) -> float:\n    return width * depth * 1.4\n"
)
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "openai chat": ("/v1/chat/completions", {"stream": True, "max_tokens": 3000}),
    "openai completions": ("/v1/completions", {"stream": True, "max_tokens": 3000}),
    "anthropic": ("/v1/messages", {"stream": True, "max_tokens": 3000}),
    "ollama chat": ("/api/chat", {"options": {"num_predict": 3000}}),
    "ollama generate": ("/api/generate", {"options": {"num_predict": 3000}}),
    "tgi": ("/generate_stream", {"parameters": {"max_new_tokens": 3000}}),
    "kserve": ("/v2/models/MODEL/generate_stream", {"max_tokens": 3000}),
}
WEBSOCKET, GRPC = "websocket chat", "kserve grpc"
PER_CONNECTION = 64  # streams on a WebSocket or a gRPC stream
WARM_SECONDS = 2.0


# -- the engine's process ---------------------------------------------------------------------------------------------


def paced_executor(config: Any) -> Any:
    """An executor that gives each sequence the next token of the text, at a fixed pace."""
    from penstock.engine.main import scheduler_config
    from penstock.messages import Capacity, KVGroup, MemoryRow, StepPlan

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests` is not installed
    from tests.plan_checks import SimulatedExecutor, SimulatedSequence

    given = json.loads(config.model)
    ids = given["ids"]
    ends = 0.0

    def seconds(plan: StepPlan) -> float:
        """Until the next end of a step: the engine's own time between steps does not add to the pace."""
        nonlocal ends
        now = time.monotonic()
        ends = max(ends + 1 / given["pace"], now)
        return ends - now

    def next_token(sequence: SimulatedSequence) -> int:
        return ids[(sequence.seq + len(sequence.tokens)) % len(ids)]  # streams are at different places of the text

    rows = (MemoryRow("weights", 0, "there are none"),)
    capacity = Capacity(16, (KVGroup(1 << 16),), vocab_size=given["vocab_size"], memory=rows)
    limits, clock = scheduler_config(config), time.monotonic
    return SimulatedExecutor(capacity, limits, clock, seconds=seconds, next_token=next_token, checks_slots=False)


def run_engine() -> None:
    from penstock.engine.main import EngineBackend
    from penstock.engine.process import serve

    sys.exit(serve(EngineBackend(paced_executor, lambda config: (json.loads(config.model)["eos"],))))


# -- the API's process ------------------------------------------------------------------------------------------------


async def run_api(port: int, grpc_port: int, streams: int, pace: float, processes: int, profile: str) -> None:
    from prometheus_client import CollectorRegistry

    from penstock.cli.address import bind, listen
    from penstock.config import EngineConfig, ServerConfig
    from penstock.engine.link.ipc import spawn
    from penstock.frontend import ModelRegistry, ServedModel, Serving, create_app, serve
    from penstock.observe.metrics import Metrics
    from penstock.text import Tokenizer
    from penstock.weights.packaged import PACKAGED

    path = next(package.locate() for package in PACKAGED if package.name == "smollm2-135m")
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    given = {"ids": ids, "pace": pace, "vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos_token_id}
    config = EngineConfig(
        model=json.dumps(given), name="simulated", max_num_seqs=streams, max_num_batched_tokens=8192, max_model_len=4096
    )
    client = await spawn(config, (sys.executable, __file__, "--engine"))
    if processes > 1:
        await run_supervisor(client, str(path), port, grpc_port, processes)
        return
    model = ServedModel(name="simulated", client=client, tokenizer=tokenizer, created=0)
    metrics = Metrics(CollectorRegistry())
    app = create_app(ModelRegistry(Serving(model, metrics)), ServerConfig(served_model_name="simulated"), metrics)
    beside = None
    if grpc_port:
        from penstock.frontend.kserve.grpc import GRPCServer

        beside = GRPCServer(app, "127.0.0.1", grpc_port)
    sock = bind("127.0.0.1", port)
    listen(sock)
    sys.setswitchinterval(0.0005)  # as `penstock serve`
    if not profile:
        await serve(app, sock, beside=beside)
        return
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    await serve(app, sock, beside=beside)
    profiler.dump_stats(profile)


async def run_supervisor(client: Any, path: str, port: int, grpc_port: int, processes: int) -> None:
    from penstock.cli.address import bind, listen
    from penstock.cli.serving.api_process import ApiStart
    from penstock.cli.serving.supervisor import Supervisor, shared_port
    from penstock.config import ServerConfig
    from penstock.prepare.model import AnswerSettings

    sockets = shared_port(bind("127.0.0.1", port), processes)
    for sock in sockets:
        listen(sock)
    server = ServerConfig(served_model_name="simulated", api_processes=processes, state_dir="none")
    answers = AnswerSettings(path=path, server=server, generation={}, pooling=None)
    grpc = ("127.0.0.1", grpc_port) if grpc_port else None
    start = ApiStart(answers=answers, texts="", created=0, grpc=grpc)
    await Supervisor(start, sockets, -1).run(client, None, lambda: 0, lambda: None)


# -- the clients ------------------------------------------------------------------------------------------------------


def body_of(wire: str) -> tuple[str, bytes]:
    path, fields = ROUTES[wire]
    asks = {"openai completions": "prompt", "ollama generate": "prompt", "tgi": "inputs", "kserve": "text_input"}
    prompt = {asks[wire]: "Hello"} if wire in asks else {"messages": [{"role": "user", "content": "Hello"}]}
    named = {} if wire in ("tgi", "kserve") else {"model": "simulated"}
    return path.replace("MODEL", "simulated"), json.dumps({**named, **prompt, **fields}).encode()


class Events:
    """Counts what the clients receive: an event has one token, or several if the API process could not keep up."""

    count = 0


async def http_stream(port: int, wire: str, events: Events) -> None:
    """Reads a stream until it is cancelled."""
    end = b'"done":false}' if wire.startswith("ollama") else b"\n\n"
    path, body = body_of(wire)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert b" 200 " in await reader.readline(), wire
        while data := await reader.read(1 << 16):
            events.count += data.count(end)
        raise ConnectionError(f"{wire}: the stream ended")
    finally:
        writer.transport.abort()


async def socket_streams(port: int, count: int, events: Events) -> None:
    from websockets.asyncio.client import connect

    body = json.loads(body_of("openai chat")[1])
    async with connect(f"ws://127.0.0.1:{port}/v1/chat/ws", compression=None) as opened:
        for i in range(count):
            await opened.send(json.dumps({"id": str(i), "body": body}))
        async for message in opened:
            assert '"type":"chunk"' in message[:40], message
            events.count += 1


async def grpc_streams(port: int, count: int, events: Events) -> None:
    import grpc.aio

    from penstock.frontend.kserve.grpc.messages import MESSAGES

    request = MESSAGES["InferRequest"](model_name="simulated")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"Hello")
    request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(True)
    request.parameters.add(key="max_tokens").value.int64_param = 3000
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        path = "/inference.GRPCInferenceService/ModelStreamInfer"
        call = channel.stream_stream(path, MESSAGES["InferRequest"].SerializeToString)()
        for _ in range(count):
            await call.write(request)
        async for _ in call:
            events.count += 1


def clients(wire: str, port: int, grpc_port: int, streams: int, events: Events) -> list[Coroutine[Any, Any, None]]:
    if wire not in (WEBSOCKET, GRPC):
        return [http_stream(port, wire, events) for _ in range(streams)]
    shares = [min(PER_CONNECTION, streams - at) for at in range(0, streams, PER_CONNECTION)]
    if wire == GRPC:
        return [grpc_streams(grpc_port, share, events) for share in shares]
    return [socket_streams(port, share, events) for share in shares]


# -- the measurement --------------------------------------------------------------------------------------------------


def cpu_seconds(pid: int) -> float:
    """The CPU time of a process so far, to the nanosecond: user and system time of all its threads."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


def api_pids(pid: int) -> list[int]:
    """The process that speaks HTTP, or the supervisor and those that do."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        children = [int(child) for child in file.read().split()]
    return [pid, *(child for child in children if b"api_process" in Path(f"/proc/{child}/cmdline").read_bytes())]


async def fetch(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return answer


async def tokens(port: int) -> float:
    lines = (await fetch(port, "/metrics")).splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("penstock_generation_tokens_total{"))


def api_command(
    port: int, streams: int, pace: float, grpc_port: int = 0, processes: int = 1, profile: str = ""
) -> list[str]:
    """Starts an API process with the simulated engine, which serves the model `simulated`: see run_api."""
    return [sys.executable, __file__, "--api", *map(str, (port, grpc_port, streams, pace, processes)), profile]


@asynccontextmanager
async def api(args: Any, port: int, grpc_port: int) -> AsyncIterator[int]:
    """The API process and its engine, as long as the block lasts. Gives the pid."""
    command = api_command(port, args.streams, args.pace, grpc_port, args.api_processes, args.profile or "")
    process = await asyncio.create_subprocess_exec(*command, preexec_fn=die_with_parent)
    try:
        for _ in range(600):
            try:
                if " 200 " in (await fetch(port, "/readyz"))[:20]:
                    break
            except OSError:
                pass
            await asyncio.sleep(0.1)
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def measure(args: Any, wire: str, pid: int, port: int, grpc_port: int) -> dict[str, Any]:
    events = Events()
    tasks = [asyncio.create_task(client) for client in clients(wire, port, grpc_port, args.streams, events)]
    try:
        gauge = "penstock_num_requests_running"
        while True:
            lines = [line for line in (await fetch(port, "/metrics")).splitlines() if line.startswith(gauge + "{")]
            if sum(float(line.rsplit(" ", 1)[1]) for line in lines) >= args.streams:
                break
            await asyncio.sleep(0.2)
        await asyncio.sleep(WARM_SECONDS)
        pids = api_pids(pid)
        first, received, before, wall = await tokens(port), events.count, [*map(cpu_seconds, pids)], time.monotonic()
        await asyncio.sleep(args.seconds)
        count, received = await tokens(port) - first, events.count - received
        used = [cpu_seconds(pid) - seconds for pid, seconds in zip(pids, before, strict=True)]
        cpu, wall = sum(used), time.monotonic() - wall
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(1)
    micros = 1e6 * cpu / received
    return {
        "wire": wire,
        "cpu_us_per_event": round(micros, 1),
        "tokens_per_event": round(count / received, 2),
        "tokens_per_second": round(count / wall),
        "core_share": round(micros * args.streams * args.pace / 1e6, 3),  # if every token is an event
        "cores": [round(seconds / wall, 3) for seconds in used],  # as it was
    }


async def run(args: Any) -> list[dict[str, Any]]:
    wires = [*ROUTES, WEBSOCKET, GRPC] if args.wires is None else args.wires.split(",")
    port, grpc_port = free_port(), free_port() if GRPC in wires else 0
    rows: list[dict[str, Any]] = []
    async with api(args, port, grpc_port) as pid:
        for round_, wire in itertools.product(range(args.runs), wires):
            row = await measure(args, wire, pid, port, grpc_port)
            print(f"{round_ + 1}: {row}", file=sys.stderr)
            rows.append(row)
    of_wire = ([row for row in rows if row["wire"] == wire] for wire in wires)
    return [min(same, key=lambda row: row["cpu_us_per_event"]) for same in of_wire]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--wires", help="names of the table, comma-separated; default: all")
    arguments.add_argument("--streams", type=int, default=256)
    arguments.add_argument("--pace", type=float, default=20.0, help="tokens a second of each stream")
    arguments.add_argument("--api-processes", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=5.0, help="of a measurement")
    arguments.add_argument("--runs", type=int, default=1, help="of each wire, interleaved; the cheapest is reported")
    arguments.add_argument("--profile", help="file for a cProfile of the API process, which makes it slower")
    args = arguments.parse_args()
    given = {name: getattr(args, name) for name in ("streams", "pace", "api_processes")}
    result = {"benchmark": "streaming", **given, "wires": asyncio.run(run(args))}
    write(result, args.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--engine"]:
        del sys.argv[1]
        run_engine()
    elif sys.argv[1:2] == ["--api"]:
        import uvloop

        own_port, own_grpc_port, own_streams = map(int, sys.argv[2:5])
        uvloop.run(run_api(own_port, own_grpc_port, own_streams, float(sys.argv[5]), int(sys.argv[6]), sys.argv[7]))
    else:
        main()
