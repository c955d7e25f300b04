"""Compares decoders that transformers' code executes: with Penstock's attention and batches, and in
`transformers.generate`.

    python benchmarks/fallback.py --json benchmarks/results/avx512_bf16/fallback.json

Four architectures outside the registry, of about 50 M parameters with random weights. Both get the same eight prompts
of different lengths and make the same number of greedy tokens, in turn. `generate` gets them as one padded batch, which
is the fastest that it offers. A rate counts output tokens; its time includes the prompts.
"""

import asyncio
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from results import CORES, parser, write

from penstock.bench.offline import run_items
from penstock.bench.workload import WorkloadRequest
from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.cli.engine import own_engine
from penstock.messages import EngineClient
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
SHAPES: dict[str, dict[str, Any]] = {"Arcee": {}, "Exaone4": {"sliding_window": 512}, "StableLm": {}, "Phi": {}}
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


def prompts_of(seed: int) -> list[list[int]]:
    """Prompts of 32, 64, ... 256 random tokens."""
    source = random.Random(seed)
    lengths = [LONGEST * (i + 1) // SEQUENCES for i in range(SEQUENCES)]
    return [[source.randrange(3, SIZES["vocab_size"]) for _ in range(length)] for length in lengths]


def rate_of_generate(model: Any, prompts: list[list[int]]) -> float:
    """Output tokens a second of one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
    mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
    began = time.perf_counter()
    made = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=OUTPUT,
        min_new_tokens=OUTPUT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    seconds = time.perf_counter() - began
    if made.shape[1] != longest + OUTPUT:
        raise RuntimeError(f"generate made {made.shape[1] - longest} tokens instead of {OUTPUT}")
    return SEQUENCES * OUTPUT / seconds


async def rate_of_penstock(client: EngineClient, prompts: list[list[int]]) -> float:
    """Output tokens a second of the same prompts."""
    items = [WorkloadRequest(tuple(prompt), OUTPUT) for prompt in prompts]
    lines, seconds = await run_items(client, items, str(prompts[0][:4]))
    if errors := [line.error for line in lines if line.error]:
        raise RuntimeError(errors[0])
    return sum(count for line in lines for _, count in line.stamps) / seconds


async def measure(name: str, rounds: int) -> dict[str, Any]:
    """The figures of one architecture: both engines in turn, after a round that warms them up."""
    rates: dict[str, list[float]] = {"penstock": [], "generate": []}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, name)
        parameters = write_model(name, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        sizes = BenchSizes("the prompts", LONGEST + OUTPUT, SEQUENCES, spare=16)
        prepared = prepare_sized(str(folder), {"dtype": "float32", "enable_prefix_caching": False}, sizes)
        async with own_engine(prepared.resolved.engine) as client:
            for round_ in range(rounds + 1):
                prompts = prompts_of(round_)
                ours, theirs = await rate_of_penstock(client, prompts), rate_of_generate(model, prompts)
                if round_:
                    rates["penstock"].append(ours)
                    rates["generate"].append(theirs)
    ratios = [a / b for a, b in zip(rates["penstock"], rates["generate"], strict=True)]
    return {
        "architecture": f"{name}ForCausalLM",
        "parameters": parameters,
        "tok_s": {engine: round(statistics.median(each), 1) for engine, each in rates.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, default=3)
    args = arguments.parse_args()
    torch.set_num_threads(CORES)
    cases = [asyncio.run(measure(name, args.rounds)) for name in SHAPES]
    result = {
        "benchmark": "fallback",
        "sequences": SEQUENCES,
        "least_ratio": min(case["ratio"] for case in cases),
        "cases": cases,
    }
    write(result, args.json, peers={"transformers": transformers.__version__})


if __name__ == "__main__":
    main()
