"""Measures what an honest client notices of hostile grammars: the gaps between the tokens of its stream.

    python benchmarks/attacks.py MODEL --rounds 3 --json benchmarks/results/amx/attacks.json

A server has one honest stream. Beside it, four clients in another process send requests with 32 choices, one after the
other. In each round every kind of request is beside the stream once, and once the stream is alone. The grammars hide:
the server's checker follows 512 bytes of a text, and theirs become slow after 600.

- `no grammar` and `harmless` are the same load without a hostile grammar: what they cost the stream is the price of 32
  more sequences in a step. `harmless` has a grammar of the same kind, and outputs of the same length.
- `hidden` and `hidden chain` are hostile.

`over_alone` and `over_harmless` are ratios of P99, the median of the rounds and their extremes.
"""

import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
from results import parser, write
from servers import free_port, running, start

from penstock.bench.workload import percentile

CLIENTS = 4
TOKENS = 300  # of the honest stream
WARM_UP = 1.0  # seconds between the first requests of a kind and the stream
FLAGS = "--max-num-seqs 64 --kv-cache-memory 256MiB --max-model-len 1024 --state-dir none"
CHAT = "/v1/chat/completions"
ALONE, HARMLESS = "alone", "harmless"


def any_two(letters: int) -> str:
    """Rules of which every one is any two of them: the parser finds each item again and again."""
    rules = [f"r{i}" for i in range(letters)]
    choice = "(" + "|".join(rules) + ")"
    return "start: /[a-z]{600}/ r0\n" + "".join(f'{rule}: {choice} {choice} | "x"\n' for rule in rules)


def chained(links: int) -> str:
    """A rule that refers to itself through each of many others."""
    choice = " | ".join(f"b{i} a" for i in range(links))
    rules = "".join(f"b{i}: a\n" for i in range(links))
    return f'start: /[a-z]{{600}}/ a\na: "x" | {choice}\n' + rules


KINDS: dict[str, str | None] = {
    "no grammar": None,
    HARMLESS: 'start: /[a-z]{600}/ "x"\n',
    "hidden": any_two(6),
    "hidden chain": chained(240),
}


def request(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "ignore_eos": True, **fields}


# -- the process that attacks ------------------------------------------------------------------------------------------


def attack(url: str, kind: str) -> None:
    """Sends requests until standard input ends. Each grammar is another text, since the server remembers verdicts."""
    import threading

    grammar, numbers = KINDS[kind], itertools.count()

    def repeat() -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while True:
                body = request("Write a long story about a river.", n=32, max_tokens=400)
                if grammar is not None:
                    body["guided_grammar"] = f"{grammar}\n// {kind} {next(numbers)} {time.monotonic()}\n"
                with contextlib.suppress(httpx.TransportError):
                    client.post(CHAT, json=body)

    for _ in range(CLIENTS):
        threading.Thread(target=repeat, daemon=True).start()
    sys.stdin.read()


@contextlib.contextmanager
def attacked(url: str, kind: str) -> Iterator[None]:
    """Runs the process that attacks. The server has no request left when the block has ended."""
    if kind == ALONE:
        yield
        return
    process = start([sys.executable, __file__, "--attack", url, kind], stdin=subprocess.PIPE)
    try:
        time.sleep(WARM_UP)
        yield
    finally:
        process.kill()
        process.wait()
        while httpx.get(f"{url}/server_load").json()["running"]:
            time.sleep(0.1)


# -- the process that measures -----------------------------------------------------------------------------------------


def gaps(client: httpx.Client) -> list[float]:
    """The seconds between the events of the honest stream, after its first token."""
    found, last = [], 0.0
    with client.stream("POST", CHAT, json=request("Count.", max_tokens=TOKENS, stream=True)) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                now = time.perf_counter()
                found.append(now - last)
                last = now
    return found[2:]  # the first two events are the role and the first token


def main() -> None:
    if sys.argv[1:2] == ["--attack"]:
        attack(*sys.argv[2:])
        return
    arguments = parser(__doc__)
    arguments.add_argument("model")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--flags", default=FLAGS, help="of the server")
    args = arguments.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", args.model, "--port", str(port), *args.flags.split()]
    p99: dict[str, list[float]] = {kind: [] for kind in (ALONE, *KINDS)}
    p50, longest = ({kind: list[float]() for kind in p99} for _ in range(2))
    with running(command, port) as (client, _):
        gaps(client)  # a warm-up
        for number in range(args.rounds):
            for kind in itertools.islice(itertools.cycle(p99), number, number + len(p99)):
                with attacked(str(client.base_url), kind):
                    found = gaps(client)
                p50[kind].append(1e3 * statistics.median(found))
                p99[kind].append(1e3 * percentile(found, 0.99))
                longest[kind].append(1e3 * max(found))
                print(f"{kind}: P99 {p99[kind][-1]:.1f} ms", file=sys.stderr, flush=True)
    rows = []
    for kind in p99:
        row: dict[str, Any] = {"kind": kind}
        for name, values in (("p50_ms", p50), ("p99_ms", p99), ("longest_ms", longest)):
            row[name] = round(statistics.median(values[kind]), 1)
        for name, base in (("over_alone", ALONE), ("over_harmless", HARMLESS)):
            ratios = [own / other for own, other in zip(p99[kind], p99[base], strict=True)]
            row[name] = [round(each, 2) for each in (statistics.median(ratios), min(ratios), max(ratios))]
        rows.append(row)
    write({"benchmark": "attacks", "model": args.model, "flags": args.flags, "rows": rows}, args.json)


if __name__ == "__main__":
    main()
