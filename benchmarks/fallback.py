"""Compares decoders that transformers' code executes: with Penstock's attention and batches, and in
`transformers.generate`.

    python benchmarks/fallback.py --json benchmarks/results/avx512_bf16/fallback.json

Four architectures outside the registry, of about 50 M parameters with random weights. Both compute eight sequences at
once and make the same numbers of greedy tokens, in turn. `generate` gets padded batches of eight, its fastest way.
"equal" is one batch whose sequences make as many tokens. "mixed" is four batches of outputs of different lengths:
`generate` waits for the longest of a batch, while Penstock takes the next request. A rate counts output tokens; its
time includes the prompts.
"""

import asyncio
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from results import CORES, parser, write

from penstock.bench.offline import run_items
from penstock.bench.workload import WorkloadRequest
from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.messages import EngineClient
from penstock.prepare.engine import own_engine
from penstock.weights.packaged import embedded_model

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHAPES: dict[str, dict[str, Any]] = {"Helium": {"head_dim": 64}, "Olmo": {}, "Nemotron": {}, "Apertus": {}}
SEQUENCES, LONGEST, OUTPUT = 8, 256, 64
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")  # prompts are token ids, but a model's folder must have one


def write_model(name: str, folder: Path) -> int:
    """Writes a checkpoint in float32. Returns the number of its parameters."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **SHAPES[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(folder)
    for each in TOKENIZER:
        if (file := embedded_model() / each).exists():
            shutil.copy(file, folder / each)
    return int(model.num_parameters())


def equal_requests(seed: int) -> list[WorkloadRequest]:
    """One batch: prompts of 32, 64, ... 256 random tokens, each with the same number of output tokens."""
    source = random.Random(seed)
    return [_request(source, LONGEST * (i + 1) // SEQUENCES, OUTPUT) for i in range(SEQUENCES)]


def mixed_requests(seed: int) -> list[WorkloadRequest]:
    """Four batches: prompts of 32 to 256 tokens and outputs of 16 to 112, in a random order."""
    source = random.Random(seed)
    return [_request(source, source.randint(32, LONGEST), source.randint(16, 112)) for _ in range(4 * SEQUENCES)]


def _request(source: random.Random, prompt: int, output: int) -> WorkloadRequest:
    return WorkloadRequest(tuple(source.randrange(3, SIZES["vocab_size"]) for _ in range(prompt)), output)


WORKLOADS = {"equal": equal_requests, "mixed": mixed_requests}


def rate_of_generate(model: Any, requests: Sequence[WorkloadRequest]) -> float:
    """Output tokens a second, in batches as the requests come, padded on the left. A batch ends with its longest."""
    began = time.perf_counter()
    for first in range(0, len(requests), SEQUENCES):
        batch = requests[first : first + SEQUENCES]
        longest, output = max(len(each.prompt_ids) for each in batch), max(each.output_len for each in batch)
        padding = [longest - len(each.prompt_ids) for each in batch]
        ids = torch.tensor([[0] * n + [*each.prompt_ids] for n, each in zip(padding, batch, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        made = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        if made.shape[1] != longest + output:
            raise RuntimeError(f"generate made {made.shape[1] - longest} tokens instead of {output}")
    return sum(each.output_len for each in requests) / (time.perf_counter() - began)


async def rate_of_penstock(client: EngineClient, requests: Sequence[WorkloadRequest], label: str) -> float:
    """Output tokens a second of the same requests."""
    lines, seconds = await run_items(client, requests, label)
    if errors := [line.error for line in lines if line.error]:
        raise RuntimeError(errors[0])
    return sum(count for line in lines for _, count in line.stamps) / seconds


async def measure(name: str, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """The figures of one architecture: both engines in turn, after a round that warms them up."""
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, name)
        parameters = write_model(name, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        sizes = BenchSizes("the prompts", LONGEST + 112, SEQUENCES, spare=16)
        prepared = prepare_sized(str(folder), {"dtype": dtype, "enable_prefix_caching": False}, sizes)
        async with own_engine(prepared.resolved.engine) as client:
            for workload, make in WORKLOADS.items():
                rates: dict[str, list[float]] = {"penstock": [], "generate": []}
                for round_ in range(rounds + 1):
                    requests = make(round_)
                    ours = await rate_of_penstock(client, requests, f"{workload}{round_}")
                    theirs = rate_of_generate(model, requests)
                    if round_:
                        rates["penstock"].append(ours)
                        rates["generate"].append(theirs)
                ratios = [a / b for a, b in zip(rates["penstock"], rates["generate"], strict=True)]
                cases.append(
                    {
                        "architecture": f"{name}ForCausalLM",
                        "parameters": parameters,
                        "dtype": dtype,
                        "workload": workload,
                        "tok_s": {engine: round(statistics.median(each), 1) for engine, each in rates.items()},
                        "ratio": round(statistics.median(ratios), 2),
                        "ratios": [round(ratio, 2) for ratio in ratios],
                    }
                )
    return cases


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments.add_argument("--architectures", nargs="+", choices=[*SHAPES], default=[*SHAPES])
    args = arguments.parse_args()
    torch.set_num_threads(CORES)
    cases = [
        case
        for name in args.architectures
        for dtype in args.dtypes
        for case in asyncio.run(measure(name, dtype, args.rounds))
    ]
    result = {
        "benchmark": "fallback",
        "sequences": SEQUENCES,
        "least_ratios": {
            f"{dtype}, {workload}": min(
                case["ratio"] for case in cases if (case["dtype"], case["workload"]) == (dtype, workload)
            )
            for dtype in args.dtypes
            for workload in WORKLOADS
        },
        "cases": cases,
    }
    write(result, args.json, peers={"transformers": transformers.__version__})


if __name__ == "__main__":
    main()
