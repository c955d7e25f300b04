"""Measures one server with `penstock bench serve`, `vllm bench serve` and aiperf, in turn: do they agree?

    python benchmarks/load_tools.py --vllm VLLM --aiperf AIPERF --json benchmarks/results/avx2/load_tools.json

VLLM and AIPERF are the commands in environments of their own. The default model is served. Each tool sends as many
requests of the same size at the same constant rate, whether or not answers have come: if it sent the next request after
an answer, its own delay before that request would decide for which step the request waits, and so the TTFT.
Percentages are against the first tool's medians. Every second round is in reverse order, so that a machine that becomes
slower or faster favours no tool.

A tool takes processor time from the server, and so changes what it measures. So the server has one processor, and the
tools have the others. With `--pace` the engine is the simulated one of streaming.py, which takes the same time for a
step whatever else runs. The gap between two requests should not be a multiple of that time, or all requests would wait
equally long for their first step.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from batch_jobs import serving
from results import parser, write
from servers import free_port, running
from streaming import api_command
from tokenizers import Tokenizer

from penstock.cli.output import show_table
from penstock.engine.processors import running_on
from penstock.gguf import read_gguf
from penstock.text.gguf_tokenizer import build_tokenizer
from penstock.text.special_tokens import SpecialTokens
from penstock.weights.packaged import SMOLLM2

MODEL, SIMULATED = SMOLLM2.name, "simulated"
# Prompts are not found in the cache, and all take as many steps. One thread, for the one processor of the server.
FLAGS = ["--no-enable-prefix-caching", "--speculation", "off", "--threads", "1"]
FIGURES = ("output_tok_s", "ttft_ms", "tpot_ms")


class Load:
    """What a tool is to send."""

    def __init__(self, url: str, args: argparse.Namespace, folder: Path) -> None:
        self.url = url
        self.model = SIMULATED if args.pace else MODEL
        self.prompts = str(args.prompts)
        self.rate = str(args.rate)
        self.prompt_len = str(args.input_len)
        self.output_len = str(args.output_len)
        self.folder = folder
        backend, special, _ = build_tokenizer(read_gguf(SMOLLM2.locate()).metadata)
        self.tokenizer = write_tokenizer(backend, special, folder / "tokenizer")
        self.texts = write_texts(backend, args.prompts, args.input_len, folder)


def write_tokenizer(backend: Tokenizer, special: SpecialTokens, folder: Path) -> str:
    """Writes a tokenizer as transformers reads it: the tools do not read that of a GGUF file."""
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    named = {name: token.content for name, token in special.named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    return str(folder)


def write_texts(backend: Tokenizer, count: int, tokens: int, folder: Path) -> dict[str, str]:
    """Writes prompts of so many tokens, in each format. Random ids would be other tokens when their text is read:
    these are words that are one token each. Returns the paths by the name of a prompt's field."""
    words = [word for each in backend.get_vocab() if (word := each.removeprefix("Ġ")) != each and word.isalpha()]
    words = sorted(word for word in words if word.isascii() and word.islower())
    draw = random.Random(0)
    texts = [" " + " ".join(draw.choices(words, k=tokens)) for _ in range(count)]
    if wrong := [text for text in texts if len(backend.encode(text).ids) != tokens]:
        raise ValueError(f"{len(backend.encode(wrong[0]).ids)} tokens instead of {tokens}: {wrong[0]}")
    paths = {field: folder / f"{field}.jsonl" for field in ("prompt", "text")}
    for field, path in paths.items():
        path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return {field: str(path) for field, path in paths.items()}


def run(command: list[str]) -> None:
    """Raises RuntimeError if the command fails."""
    environment = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def penstock(load: Load) -> dict[str, float]:
    out = load.folder / "penstock.json"
    options = {
        "--url": load.url,
        "--num-prompts": load.prompts,
        "--request-rate": load.rate,
        "--burstiness": "inf",
        "--input-len": load.prompt_len,
        "--output-len": load.output_len,
        "--json": str(out),
    }
    run([sys.executable, "-m", "penstock", "bench", "serve", *itertools.chain(*options.items())])
    found = json.loads(out.read_text())
    return dict(zip(FIGURES, (found["output_tok_s"], found["ttft_ms_p50"], found["tpot_ms_p50"]), strict=True))


def vllm(program: str, load: Load) -> dict[str, float]:
    options = {
        "--base-url": load.url,
        "--model": load.model,
        "--tokenizer": load.tokenizer,
        "--dataset-name": "custom",
        "--dataset-path": load.texts["prompt"],
        "--custom-output-len": load.output_len,
        "--num-prompts": load.prompts,
        "--request-rate": load.rate,
        "--burstiness": "inf",
        "--result-dir": str(load.folder),
        "--result-filename": "vllm.json",
    }
    command = [program, "bench", "serve", "--backend", "openai", *itertools.chain(*options.items())]
    run([*command, "--skip-chat-template", "--ignore-eos", "--save-result", "--disable-tqdm"])
    found = json.loads((load.folder / "vllm.json").read_text())
    figures = (found["output_throughput"], found["median_ttft_ms"], found["median_tpot_ms"])
    return dict(zip(FIGURES, figures, strict=True))


def aiperf(program: str, load: Load) -> dict[str, float]:
    artifacts = load.folder / "aiperf"
    options = {
        "--url": load.url,
        "--model": load.model,
        "--tokenizer": load.tokenizer,
        "--endpoint-type": "completions",
        "--custom-dataset-type": "single_turn",
        "--input-file": load.texts["text"],
        "--extra-inputs": f"ignore_eos:true,max_tokens:{load.output_len}",
        "--request-count": load.prompts,
        "--request-rate": load.rate,
        "--request-rate-mode": "constant",
        "--workers-max": "1",  # by default a dozen processes, more than a small machine has room for
        "--record-processors": "1",
        "--artifact-dir": str(artifacts),
        "--ui": "none",
    }
    command = [program, "profile", "--streaming", "--use-server-token-count", *itertools.chain(*options.items())]
    run([*command, "--no-gpu-telemetry", "--no-server-metrics"])
    found = json.loads(next(artifacts.rglob("profile_export_aiperf.json")).read_text())
    figures = (
        found["output_token_throughput"]["avg"],
        found["time_to_first_token"]["p50"],
        found["inter_token_latency"]["p50"],  # (end - first token) / (tokens - 1), as the others' TPOT
    )
    return dict(zip(FIGURES, figures, strict=True))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--vllm", metavar="PROGRAM", help="of an environment with vLLM")
    arguments.add_argument("--aiperf", metavar="PROGRAM", help="of an environment with aiperf")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--prompts", type=int, default=48)
    arguments.add_argument("--rate", type=float, default=1.0, help="requests a second")
    arguments.add_argument("--input-len", type=int, default=128)
    arguments.add_argument("--output-len", type=int, default=64)
    arguments.add_argument("--pace", type=float, help="tokens a second of a request, by a simulated engine")
    args = arguments.parse_args()
    tools = {"penstock bench serve": penstock}
    if args.vllm:
        tools["vllm bench serve"] = lambda load: vllm(args.vllm, load)
    if args.aiperf:
        tools["aiperf"] = lambda load: aiperf(args.aiperf, load)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        port = free_port()
        simulated = api_command(port, args.prompts, args.pace)
        processors = os.sched_getaffinity(0)
        own = {max(processors)}
        with contextlib.ExitStack() as server:
            with running_on(own):
                server.enter_context(running(simulated, port) if args.pace else serving(FLAGS, folder, port))
            os.sched_setaffinity(0, processors - own or own)
            url = f"http://127.0.0.1:{port}"
            load = Load(url, args, folder)
            penstock(load)  # a warm-up
            for number in range(args.rounds):
                order = list(tools.items())
                for name, measure in reversed(order) if number % 2 else order:
                    rounds[name].append(measure(load))
    medians = {
        name: {figure: round(statistics.median(each[figure] for each in found), 2) for figure in FIGURES}
        for name, found in rounds.items()
    }
    first = medians["penstock bench serve"]
    rows = [
        {"tool": name} | {figure: f"{found[figure]:g} ({found[figure] / first[figure] - 1:+.1%})" for figure in FIGURES}
        for name, found in medians.items()
    ]
    columns = [("tool", "tool"), ("output tok/s", FIGURES[0]), ("TTFT ms", FIGURES[1]), ("TPOT ms", FIGURES[2])]
    show_table("one server, by each tool", columns, rows)
    keys = ("rounds", "prompts", "rate", "input_len", "output_len", "pace")
    settings = {key: getattr(args, key) for key in keys}
    result: dict[str, Any] = {"benchmark": "load_tools", "model": load.model, **settings, "medians": medians}
    write(result | {"rounds_of_each": rounds}, args.json)


if __name__ == "__main__":
    main()
