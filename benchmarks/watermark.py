"""Measures how surely a watermark is found, how often it is found by mistake, and what it costs in perplexity.

    python benchmarks/watermark.py [MODEL] [--outputs 100] [--tokens 200] [--temperature 1] [--top-p 1] [--keys 200]
        [--json FILE]

Each scheme, and no watermark, samples the same prompts with the same seeds: `outputs` answers of `tokens` tokens each,
without an end-of-sequence token. An answer is turned into text and tokenised again, as someone would who has only the
text. `found` is the share of these whose p is below 1e-4; `p_median` and `p_95` are percentiles of p. `perplexity` is
that of the answers by the model itself, at temperature 1. `distinct` is the share of different 4-grams in an answer.

`false` is the share of texts without a watermark whose p is below a limit: windows of `tokens` tokens of Python's help
texts, each under `keys` keys. It needs no engine.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from results import parser, write

from penstock.bench.quality import english
from penstock.config import EngineConfig
from penstock.messages import EngineClient, GenerateRequest, SamplingParams, unpack_rows
from penstock.prepare.engine import own_engine
from penstock.prepare.model import prepare
from penstock.runtime.sampling.watermark import CONTEXT, Watermark, detect
from penstock.text import Tokenizer

SECRET = "a key of this benchmark"
SUBJECTS = ("a lighthouse", "the history of bread", "learning to swim", "a city in the desert", "how rivers form")
ASKED = ("Write a story about {}.", "Explain {} to a child.", "Write a letter to a friend about {}.", "Describe {}.")
LIMITS = (1e-2, 1e-3, 1e-4)


async def answers(
    config: EngineConfig, tokenizer: Tokenizer, count: int, sampling: SamplingParams
) -> tuple[list[list[int]], float]:
    """The tokens of the answers, and their perplexity."""
    async with own_engine(config) as client:
        made = await asyncio.gather(*(answer(client, tokenizer, i, sampling) for i in range(count)))
    logprobs = [value for _, values in made for value in values]
    return [token_ids for token_ids, _ in made], math.exp(-sum(logprobs) / len(logprobs))


async def answer(
    client: EngineClient, tokenizer: Tokenizer, index: int, sampling: SamplingParams
) -> tuple[list[int], list[float]]:
    question = ASKED[index // len(SUBJECTS) % len(ASKED)].format(SUBJECTS[index % len(SUBJECTS)])
    template = tokenizer.chat_template
    prompt = question if template is None else template.render([{"role": "user", "content": question}])
    ids = tokenizer.encode(prompt, add_special_tokens=template is None)
    request = GenerateRequest(request_id=str(index), prompt_ids=tuple(ids), sampling=replace(sampling, seed=index))
    token_ids: list[int] = []
    values: list[float] = []
    async for delta in client.generate(request):
        if delta.error:
            raise ValueError(delta.error)
        token_ids += delta.token_ids
        values += [row.logprob for row in unpack_rows(delta.logprobs, 0)]
    return token_ids, values


def evidence(tokenizer: Tokenizer, outputs: Sequence[Sequence[int]], watermark: Watermark) -> dict[str, Any]:
    read = [tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) for ids in outputs]
    p = np.array([detect(watermark, ids).p for ids in read])
    return {
        "found": float((p < 1e-4).mean()),
        "p_median": float(np.median(p)),
        "p_95": float(np.percentile(p, 95)),
    }


def distinct(outputs: Sequence[Sequence[int]]) -> float:
    shares = [len({tuple(ids[i : i + 4]) for i in range(len(ids) - 3)}) / (len(ids) - 3) for ids in outputs]
    return round(float(np.mean(shares)), 4)


def false_alarms(tokenizer: Tokenizer, size: int, keys: int) -> dict[str, Any]:
    ids = tokenizer.encode(english(), add_special_tokens=False)
    windows = [ids[i : i + size] for i in range(0, len(ids) - size, size)]
    found: dict[str, Any] = {"windows": len(windows), "keys": keys}
    for scheme in CONTEXT:
        marks = [Watermark.of(scheme, f"key {i}") for i in range(keys)]  # type: ignore[arg-type]
        p = np.array([detect(mark, window).p for mark in marks for window in windows])
        found[scheme] = {f"p < {limit:g}": float((p < limit).mean()) for limit in LIMITS}
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", nargs="?")
    options.add_argument("--outputs", type=int, default=100)
    options.add_argument("--tokens", type=int, default=200)
    options.add_argument("--temperature", type=float, default=1.0)
    options.add_argument("--top-p", type=float, default=1.0)
    options.add_argument("--keys", type=int, default=200)
    given = options.parse_args()
    prepared = prepare(given.model, {"max_model_len": str(given.tokens + 200), "kv_cache_memory": "512MB"})
    tokenizer, config = Tokenizer.load(prepared.path), prepared.resolved.engine
    sampling = SamplingParams(
        seed=0, max_tokens=given.tokens, temperature=given.temperature, top_p=given.top_p, logprobs=0
    )
    schemes: dict[str, Any] = {}
    for scheme in ("none", *CONTEXT):
        marked = replace(config, watermark=scheme, watermark_key="" if scheme == "none" else SECRET)
        outputs, perplexity = asyncio.run(answers(marked, tokenizer, given.outputs, sampling))
        schemes[scheme] = {"perplexity": round(perplexity, 3), "distinct": distinct(outputs)}
        if scheme != "none":
            watermark = Watermark.of(scheme, SECRET)  # type: ignore[arg-type]
            schemes[scheme] |= evidence(tokenizer, outputs, watermark)
        print(scheme, schemes[scheme], flush=True)
    false = false_alarms(tokenizer, given.tokens, given.keys)
    print("false", false)
    figures = {name: getattr(given, name) for name in ("outputs", "tokens", "temperature", "top_p")}
    write({"model": config.name, **figures, "schemes": schemes, "false": false}, given.json)


if __name__ == "__main__":
    main()
