"""Compares routers in front of equal engines, in turns, with prompts that share prefixes.

    python benchmarks/fleet_routers.py --smg .../bin/smg --vllm-router .../bin/vllm-router --json ...

Two servers of SmolLM2 (`penstock serve`) are behind smg and vllm-router, by HTTP. The same two models as `penstock
engine` are behind `penstock serve --engines`, with `--route cost` and with `round-robin`. The side that does not run is
idle. Each turn has documents of its own, so no prefix cache has them.

The traffic is that of `documents` in fleet.py, as texts: long documents with a question each, several times, in random
order; all fit into both KV caches together, not into one. `reuse` is the share of prompt tokens that the engines had.
"""

import contextlib
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from results import parser, write
from servers import free_port, start

MODEL, KV_BYTES = "smollm2-135m", "120MiB"
FLAGS = ("--max-num-seqs", "32", "--threads", "1", "--max-model-len", "1024", "--kv-cache-memory", KV_BYTES)
DOCUMENTS, WORDS, VISITS, AT_ONCE, OUTPUT = 12, 480, 5, 2, 8
SECONDS = 120.0


def traffic(seed: int) -> list[str]:
    drawn = random.Random(seed)
    words = [f"{first}{last}" for first in ("re", "con", "de", "pro", "in", "ex") for last in ("port", "duce", "tract")]
    documents = [" ".join(drawn.choice(words) for _ in range(WORDS // 2)) for _ in range(DOCUMENTS)]
    prompts = []
    for visit in range(VISITS):
        drawn.shuffle(documents)
        prompts += [f"{each}\nQuestion {visit}-{drawn.randrange(10**6)}:" for each in documents]
    return prompts


def ask(client: httpx.Client, url: str, prompt: str) -> tuple[float, int, int]:
    """Returns (seconds to the first token, prompt tokens, of these cached)."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": OUTPUT,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began, first, usage = time.perf_counter(), 0.0, {}
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{url}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                first = first or time.perf_counter() - began
                usage = event.get("usage") or usage
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return first, usage["prompt_tokens"], cached


def turn(url: str, prompts: list[str]) -> dict[str, float]:
    with httpx.Client(timeout=SECONDS) as client, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda prompt: ask(client, url, prompt), prompts))
    later = [first for first, *_ in answers[DOCUMENTS:]]  # after the first visit of each document, which is cold
    return {
        "reuse": sum(cached for *_, cached in answers) / sum(tokens for _, tokens, _ in answers),
        "ttft_ms": 1e3 * statistics.mean(first for first, *_ in answers),
        "ttft_ms_p50": 1e3 * statistics.median(first for first, *_ in answers),
        "ttft_ms_later": 1e3 * statistics.mean(later),
    }


@contextlib.contextmanager
def processes(commands: list[list[str]], folder: Path, name: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    with contextlib.ExitStack() as held:
        found = []
        for number, command in enumerate(commands):
            log = held.enter_context((folder / f"{name}-{number}").open("wb"))
            process = start(command, stdout=log, stderr=log)
            held.callback(process.wait)
            held.callback(process.kill)
            found.append(process)
        yield found


def until_ready(url: str, path: str) -> None:
    for _ in range(int(SECONDS / 0.2)):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + path, timeout=2).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"{url}{path} does not answer")


def address_of(log: Path) -> str:
    for _ in range(int(SECONDS / 0.2)):
        if match := re.search(r"listens on (\S+),", log.read_text()):
            return match[1]
        time.sleep(0.2)
    raise RuntimeError(log.read_text())


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--smg", help="the command of smg")
    arguments.add_argument("--vllm-router", help="the command of vllm-router")
    arguments.add_argument("--rounds", type=int, default=3, help="turns of each router (3)")
    given = arguments.parse_args()
    penstock = [sys.executable, "-m", "penstock"]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as held:
        folder, sides = Path(name), dict[str, str]()
        ports = [free_port() for _ in range(2)]
        serve = [[*penstock, "serve", MODEL, "--port", str(port), "--state-dir", "none", *FLAGS] for port in ports]
        engine = [[*penstock, "engine", MODEL, "--listen", "127.0.0.1:0", *FLAGS] for _ in ports]
        held.enter_context(processes(engine, folder, "engine"))
        addresses = ",".join(address_of(folder / f"engine-{number}") for number in range(2))
        for route in ("cost", "round-robin"):
            port = free_port()
            front = ["serve", "--engines", addresses, "--route", route, "--port", str(port), "--state-dir", "none"]
            held.enter_context(processes([[*penstock, *front]], folder, route))
            url = f"http://127.0.0.1:{port}"
            until_ready(url, "/readyz")
            sides[f"penstock {route}"] = url
        held.enter_context(processes(serve, folder, "serve"))
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        for url in urls:
            until_ready(url, "/readyz")
        for peer, command in (("smg", given.smg), ("vllm-router", given.vllm_router)):
            if command is None:
                continue
            port = free_port()
            launch = [command, *(["launch"] if peer == "smg" else []), "--worker-urls", *urls, "--port", str(port)]
            launch += ["--policy", "cache_aware", "--prometheus-port", str(free_port())]
            held.enter_context(processes([launch], folder, peer))
            url = f"http://127.0.0.1:{port}"
            until_ready(url, "/health")
            sides[peer] = url
        runs: dict[str, list[dict[str, float]]] = {each: [] for each in sides}
        for number in range(given.rounds):
            for place, each in list(enumerate(sides))[:: 1 if number % 2 else -1]:
                runs[each].append(turn(sides[each], traffic(number * len(sides) + place)))
                print(each, runs[each][-1], file=sys.stderr)
    result: dict[str, Any] = {"benchmark": "fleet_routers", "rounds": given.rounds}
    for each, found in runs.items():
        result[each] = {name: round(statistics.median(one[name] for one in found), 4) for name in found[0]}
    write(result, given.json)


if __name__ == "__main__":
    main()
