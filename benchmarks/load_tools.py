"""Measures one server with `penstock bench serve`, `vllm bench serve` and aiperf, in turn: do they agree?

    python benchmarks/load_tools.py --vllm VLLM --aiperf AIPERF --json benchmarks/results/avx2/load_tools.json

VLLM and AIPERF are the commands in environments of their own. The default model is served. Each tool sends as many
requests of the same size, as many at a time, in its own way. Percentages are against the first tool's medians.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from batch_jobs import serving
from results import parser, write

from penstock.cli.address import bind
from penstock.cli.output import show_table
from penstock.gguf import read_gguf
from penstock.text.gguf_tokenizer import build_tokenizer
from penstock.weights.packaged import SMOLLM2

MODEL = SMOLLM2.name
FIGURES = ("output_tok_s", "ttft_ms", "tpot_ms")


class Load:
    """What a tool is to send."""

    def __init__(self, url: str, prompts: int, at_a_time: int, prompt_len: int, output_len: int, folder: Path) -> None:
        self.url = url
        self.prompts = str(prompts)
        self.at_a_time = str(at_a_time)
        self.prompt_len = str(prompt_len)
        self.output_len = str(output_len)
        self.folder = folder
        self.tokenizer = write_tokenizer(folder / "tokenizer")


def write_tokenizer(folder: Path) -> str:
    """Writes the model's tokenizer as transformers reads it: the tools do not read that of a GGUF file."""
    backend, special, _ = build_tokenizer(read_gguf(SMOLLM2.locate()).metadata)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    named = {name: token.content for name, token in special.named.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **named}))
    return str(folder)


def run(command: list[str]) -> None:
    """Raises RuntimeError if the command fails."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def penstock(load: Load) -> dict[str, float]:
    out = load.folder / "penstock.json"
    command = [sys.executable, "-m", "penstock", "bench", "serve", "--url", load.url, "--json", str(out)]
    run([*command, "--num-prompts", load.prompts, "--concurrency", load.at_a_time,
         "--input-len", load.prompt_len, "--output-len", load.output_len])  # fmt: skip
    found = json.loads(out.read_text())
    return dict(zip(FIGURES, (found["output_tok_s"], found["ttft_ms_p50"], found["tpot_ms_p50"]), strict=True))


def vllm(program: str, load: Load) -> dict[str, float]:
    command = [program, "bench", "serve", "--backend", "openai", "--base-url", load.url, "--model", MODEL]
    run([*command, "--tokenizer", load.tokenizer, "--dataset-name", "random", "--random-input-len", load.prompt_len,
         "--random-output-len", load.output_len, "--num-prompts", load.prompts, "--max-concurrency", load.at_a_time,
         "--ignore-eos", "--save-result", "--result-dir", str(load.folder), "--result-filename", "vllm.json",
         "--disable-tqdm"])  # fmt: skip
    found = json.loads((load.folder / "vllm.json").read_text())
    figures = (found["output_throughput"], found["median_ttft_ms"], found["median_tpot_ms"])
    return dict(zip(FIGURES, figures, strict=True))


def aiperf(program: str, load: Load) -> dict[str, float]:
    artifacts = load.folder / "aiperf"
    command = [program, "profile", "--model", MODEL, "--url", load.url, "--endpoint-type", "completions", "--streaming"]
    run([*command, "--tokenizer", load.tokenizer, "--isl", load.prompt_len, "--osl", load.output_len,
         "--concurrency", load.at_a_time, "--request-count", load.prompts, "--extra-inputs", "ignore_eos:true",
         "--use-server-token-count", "--artifact-dir", str(artifacts), "--ui", "none"])  # fmt: skip
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
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--prompts", type=int, default=64)
    arguments.add_argument("--concurrency", type=int, default=4)
    arguments.add_argument("--input-len", type=int, default=128)
    arguments.add_argument("--output-len", type=int, default=64)
    args = arguments.parse_args()
    tools = {"penstock bench serve": penstock}
    if args.vllm:
        tools["vllm bench serve"] = lambda load: vllm(args.vllm, load)
    if args.aiperf:
        tools["aiperf"] = lambda load: aiperf(args.aiperf, load)
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with bind("127.0.0.1", 0) as probe:
            port = probe.getsockname()[1]
        with serving(["--speculation", "off"], folder, port):
            url = f"http://127.0.0.1:{port}"
            load = Load(url, args.prompts, args.concurrency, args.input_len, args.output_len, folder)
            penstock(load)  # a warm-up
            for _ in range(args.rounds):
                for name, measure in tools.items():
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
    settings = {key: getattr(args, key) for key in ("rounds", "prompts", "concurrency", "input_len", "output_len")}
    result: dict[str, Any] = {"benchmark": "load_tools", "model": MODEL, **settings, "medians": medians}
    write(result | {"rounds_of_each": rounds}, args.json)


if __name__ == "__main__":
    main()
