"""Compares the embedding of texts of mixed length, and of one short text, with other engines: interleaved, at equal
precision and threads, from text to vectors. Penstock is asked through its engine's own process.

python benchmarks/embeddings.py --peer-python PEERS/bin/python --json benchmarks/results/avx512/embeddings.json

The peers' environment needs sentence-transformers, onnxruntime, onnx and openvino.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import results

from penstock.config import EngineConfig
from penstock.engine.launch import launch
from penstock.messages import EngineClient, GenerateRequest, PoolingParams, SamplingParams
from penstock.text import Tokenizer
from penstock.weights.packaged import MINILM

PEER = Path(__file__).parent / "peers" / "embeddings.py"
PEERS = {
    "float32": ("sentence-transformers", "onnxruntime", "openvino"),
    "bfloat16": ("sentence-transformers", "openvino"),
}
AT_ONCE = 128
SHORT = "a penstock feeds a turbine"
WORDS = ["the", "pipe", "that", "keeps", "a", "turbine", "under", "full", "head", "is", "called", "penstock", "lake"]

Run = Callable[[list[str]], Awaitable[dict]]


def texts_of(count: int, seed: int) -> list[str]:
    """Texts of 3 to 200 words, most of them short, as queries and passages are."""
    rng = random.Random(seed)
    lengths = (min(200, max(3, int(rng.lognormvariate(3.4, 1.0)))) for _ in range(count))
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def penstock(client: EngineClient, tokenizer: Tokenizer) -> Run:
    serial = iter(range(10**9))

    async def run(texts: list[str]) -> dict:
        began = time.perf_counter()
        found: list[np.ndarray] = [np.empty(0)] * len(texts)
        todo = iter(range(len(texts)))

        async def work() -> None:
            for i in todo:
                tokens = tokenizer.encode_text(texts[i]).cut(256)
                request = GenerateRequest(
                    request_id=str(next(serial)),
                    prompt_ids=tokens.ids,
                    sampling=SamplingParams(seed=0, max_tokens=1),
                    pooling=PoolingParams(),
                )
                async for delta in client.generate(request):
                    found[i] = np.frombuffer(delta.pooled, np.float32)

        await asyncio.gather(*(work() for _ in range(min(AT_ONCE, len(texts)))))
        return {"seconds": time.perf_counter() - began, "vectors": [row[:4].tolist() for row in found]}

    return run


def peer(process: subprocess.Popen[str]) -> Run:
    async def run(texts: list[str]) -> dict:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(texts) + "\n")
        process.stdin.flush()
        answer: dict = json.loads(await asyncio.to_thread(process.stdout.readline))
        return answer

    return run


async def compare(options: argparse.Namespace, dtype: str) -> dict:
    folder = MINILM.locate()
    config = EngineConfig(
        model=str(folder),
        name="minilm",
        device="cpu",
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=256,
        max_num_batched_tokens=options.step_tokens,
        threads=options.threads,
    )
    client = await launch(config)
    engines: dict[str, Run] = {"penstock": penstock(client, Tokenizer.load(folder))}
    processes = []
    for name in PEERS[dtype]:
        command = [options.peer_python, str(PEER), name, str(folder), str(options.threads), dtype]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        processes.append(process)
        engines[name] = peer(process)
    try:
        texts = texts_of(options.texts, 1)
        for run in engines.values():  # first runs compile and allocate
            await run(texts_of(8, 2))
        many: dict[str, list[float]] = {name: [] for name in engines}
        short: dict[str, list[float]] = {name: [] for name in engines}
        exact: np.ndarray | None = None
        worst = dict.fromkeys(engines, 0.0)
        for _ in range(options.rounds):
            for name, run in engines.items():
                answer = await run(texts)
                many[name].append(answer["seconds"])
                rows = np.array(answer["vectors"])
                exact = rows if exact is None else exact
                worst[name] = max(worst[name], float(np.abs(rows - exact).max()))
            for name, run in engines.items():
                short[name].append(statistics.median([(await run([SHORT]))["seconds"] for _ in range(20)]))
    finally:
        await client.close()
        for process in processes:
            process.terminate()
            process.wait()
    figures: dict = {"dtype": dtype, "engines": {}}
    for name in engines:
        figures["engines"][name] = {
            "texts_per_second": round(options.texts / statistics.median(many[name]), 1),
            "short_ms": round(statistics.median(short[name]) * 1e3, 2),
            "furthest_from_penstock": float(f"{worst[name]:.2g}"),
        }
    peers = [name for name in engines if name != "penstock"]
    figures["times_best_peer"] = round(
        statistics.median(min(many[name][i] for name in peers) / many["penstock"][i] for i in range(options.rounds)), 2
    )
    figures["short_times_best_peer"] = round(
        statistics.median(min(short[name][i] for name in peers) / short["penstock"][i] for i in range(options.rounds)),
        2,
    )
    return figures


def versions(python: str) -> dict[str, str]:
    """The peers' versions."""
    names = ("sentence-transformers", "onnxruntime", "openvino", "torch", "transformers")
    code = f"import importlib.metadata as m, json; print(json.dumps({{n: m.version(n) for n in {names!r}}}))"
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout)
    return found


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--peer-python", required=True, help="of the environment that has the peers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    figures = [asyncio.run(compare(options, dtype)) for dtype in options.dtypes]
    tokens = [len(Tokenizer.load(MINILM.locate()).encode_text(text).ids) for text in texts_of(options.texts, 1)]
    given = {
        "threads": options.threads,
        "texts": options.texts,
        "tokens": sum(tokens),
        "longest": max(tokens),
        "rounds": options.rounds,
        "step_tokens": options.step_tokens,
        "figures": figures,
    }
    results.write(given, options.json, peers=versions(options.peer_python))


if __name__ == "__main__":
    main()
