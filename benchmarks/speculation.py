"""Compares decoding with speculation and without it, on text that repeats its prompt and on text that does not.

    python benchmarks/speculation.py MODEL --json benchmarks/results/speculation.json

Two engines have the model loaded; one of them speculates. Each round runs a case on both, in an order that alternates,
with the same prompts, seeds and a cache salt of its own: nothing of an earlier round helps a later one. Both give the
same tokens, else the benchmark fails. `ratio` is the median over the rounds of the rate with speculation over the rate
without; `decode_ratio` leaves the prefill out. `accepted_per_step` is the mean number of drafts accepted where a step
has drafts.

The copies are what speculation is made for: a file repeated with one change, and passages quoted from a document. The
others check that it costs nothing where it cannot help.
"""

import asyncio
import heapq
import inspect
import random
import shlex
import statistics
import string
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from results import parser, save, write

from penstock.bench.workload import random_prompt
from penstock.cli.bench_sizes import BenchSizes, prepare_sized
from penstock.cli.prepare import PreparedModel
from penstock.engine.launch import launch
from penstock.engine.processors import keep_off
from penstock.messages import EngineClient, EngineStats, GenerateRequest, SamplingParams
from penstock.text import Tokenizer

PAUSE = 0.1  # seconds before a run: the other engine's native threads spin for about 1 ms after a step, then sleep
CONTEXT = 2048
SOURCES = (statistics.quantiles, heapq.merge, textwrap.TextWrapper, string.Formatter, heapq.nsmallest)
DOCUMENTS = (heapq.__about__, textwrap.TextWrapper.__doc__, statistics.__doc__)  # type: ignore[attr-defined]
PROSE = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the sky is blue.",
    "Describe a walk through a market in the morning.",
    "Give advice to someone who starts to learn the violin.",
    "What makes a good teacher?",
    "Write a letter to a friend about a journey by train.",
    "Explain how bread is made.",
    "Tell me about the life of a honey bee.",
)


class Item(NamedTuple):
    """A request: its prompt, its predicted output, and how it is sampled."""

    prompt: tuple[int, ...]
    prediction: tuple[int, ...]
    temperature: float
    max_tokens: int
    ignore_eos: bool


class Run(NamedTuple):
    """One run of a case on one engine."""

    tokens: list[list[int]]  # of each request
    rate: float  # tokens per second, from the first request to the last token
    decode_rate: float  # tokens after a request's first one, per second of the mean request's decoding
    drafts: int
    draft_tokens: int
    accepted: int
    steps: int


Case = Callable[[int, random.Random], list[Item]]


def cases(tokenizer: Tokenizer, vocabulary: int) -> dict[str, Case]:
    """The items of each case, for a batch size."""

    def chat(text: str) -> tuple[int, ...]:
        template = tokenizer.chat_template
        assert template is not None, "the model has no chat template"
        messages = [{"role": "user", "content": text}]
        return tuple(tokenizer.encode(template.render(messages, add_generation_prompt=True), add_special_tokens=False))

    def sources(batch: int, source: random.Random) -> list[str]:
        start = source.randrange(len(SOURCES))
        return [inspect.getsource(SOURCES[(start + i) % len(SOURCES)])[:2400] for i in range(batch)]

    def edit(batch: int, source: random.Random, predicted: bool = False) -> list[Item]:
        ask = "Repeat this Python file without a change, except that the name `{}` becomes `{}`. Give only code.\n\n"
        items = []
        for text in sources(batch, source):
            old = max(("key", "hi", "item", "self", "n", "text"), key=text.count)
            prompt = ask.format(old, old + "_value") + f"```python\n{text}```"
            prediction = tokenizer.encode(f"```python\n{text}```", add_special_tokens=False) if predicted else ()
            items.append(Item(chat(prompt), tuple(prediction), 0.0, 384, True))
        return items

    def quote(batch: int, source: random.Random) -> list[Item]:
        start = source.randrange(len(DOCUMENTS))
        texts = [inspect.cleandoc(DOCUMENTS[(start + i) % len(DOCUMENTS)] or "")[:2400] for i in range(batch)]
        ask = "Answer from the document: quote the passages about how it is used, word for word.\n\n"
        return [Item(chat(ask + text), (), 0.0, 256, True) for text in texts]

    def prose(temperature: float) -> Case:
        def items(batch: int, source: random.Random) -> list[Item]:
            texts = [PROSE[(source.randrange(len(PROSE)) + i) % len(PROSE)] for i in range(batch)]
            return [Item(chat(text), (), temperature, 192, True) for text in texts]

        return items

    def noise(temperature: float) -> Case:
        def items(batch: int, source: random.Random) -> list[Item]:
            return [Item(random_prompt(256, vocabulary, source), (), temperature, 128, True) for _ in range(batch)]

        return items

    return {
        "edit": edit,
        "edit, predicted": lambda batch, source: edit(batch, source, True),
        "quote": quote,
        "prose, greedy": prose(0.0),
        "prose, sampled": prose(0.8),
        "random, greedy": noise(0.0),
        "random, sampled": noise(1.0),
    }


async def run(client: EngineClient, items: Sequence[Item], name: str) -> Run:
    """Runs all items at once."""
    tokens: list[list[int]] = [[] for _ in items]
    spans = []

    async def one(i: int, item: Item) -> None:
        sampling = SamplingParams(
            seed=i,
            max_tokens=item.max_tokens,
            temperature=item.temperature,
            eos_token_ids=client.info.eos_token_ids,
            ignore_eos=item.ignore_eos,
        )
        request = GenerateRequest(
            request_id=f"{name}-{i}",
            prompt_ids=item.prompt,
            sampling=sampling,
            cache_salt=name,
            prediction_ids=item.prediction,
        )
        first = last = 0.0
        async for delta in client.generate(request):
            if delta.error:
                raise RuntimeError(delta.error)
            if delta.token_ids:
                last = time.perf_counter()
                first = first or last
                tokens[i] += delta.token_ids
        spans.append(last - first)

    await asyncio.sleep(PAUSE)
    before = await _stats(client)
    start = time.perf_counter()
    with keep_off(client.info.cpu):
        await asyncio.gather(*(one(i, item) for i, item in enumerate(items)))
    elapsed = time.perf_counter() - start
    after = await _stats(client)
    count = sum(map(len, tokens))
    return Run(
        tokens,
        count / elapsed,
        (count - len(items)) / statistics.mean(spans),
        after.drafts - before.drafts,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
        after.steps - before.steps,
    )


async def _stats(client: EngineClient) -> EngineStats:
    await asyncio.sleep(0.05)  # the last step's stats come with its deltas
    return client.stats()


def summary(case: str, batch: int, pairs: Sequence[tuple[Run, Run]]) -> dict[str, Any]:
    """The figures of a case. `pairs`: without speculation, with it."""
    drafts = sum(on.drafts for _, on in pairs)
    return {
        "case": case,
        "batch": batch,
        "ratio": round(statistics.median(on.rate / off.rate for off, on in pairs), 3),
        "decode_ratio": round(statistics.median(on.decode_rate / off.decode_rate for off, on in pairs), 3),
        "decode_ratios": [round(on.decode_rate / off.decode_rate, 3) for off, on in pairs],
        "tok_s_off": round(statistics.median(off.decode_rate for off, _ in pairs), 1),
        "tok_s_on": round(statistics.median(on.decode_rate for _, on in pairs), 1),
        "tokens_per_step": round(
            sum(map(len, (t for _, on in pairs for t in on.tokens))) / sum(on.steps for _, on in pairs), 2
        ),
        "drafted_per_step": round(sum(on.draft_tokens for _, on in pairs) / max(drafts, 1), 2),
        "accepted_per_step": round(sum(on.accepted for _, on in pairs) / max(drafts, 1), 2),
        "acceptance": round(sum(on.accepted for _, on in pairs) / max(sum(on.draft_tokens for _, on in pairs), 1), 3),
    }


async def measure(off: PreparedModel, on: PreparedModel, args: Any) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.load(on.path)
    async with AsyncExitStack() as stack:
        clients = []
        for prepared in (off, on):
            client = await launch(prepared.resolved.engine)
            stack.push_async_callback(client.close)
            clients.append(client)
        rows = []
        chosen = cases(tokenizer, clients[0].info.vocab_size)
        for name in args.cases.split(";") if args.cases else chosen:
            for batch in map(int, args.batches.split(",")):
                pairs = []
                for round_ in range(args.rounds + 1):
                    items = chosen[name](batch, random.Random(f"{name} {batch} {round_}"))
                    order = (0, 1) if round_ % 2 else (1, 0)
                    runs = {i: await run(clients[i], items, f"{name}-{batch}-{round_}") for i in order}
                    if runs[0].tokens != runs[1].tokens:
                        raise RuntimeError(f"{name}, batch {batch}: speculation changed the tokens")
                    if round_:  # the first one warms up, and measures steps
                        pairs.append((runs[0], runs[1]))
                rows.append(summary(name, batch, pairs))
                print(rows[-1], flush=True)
        return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", help="a model with a chat template")
    arguments.add_argument("--flags", default="", help="of both engines")
    arguments.add_argument("--speculation", default="suffix", help="of the engine that speculates")
    arguments.add_argument("--cases", default="", help="names with semicolons between them; default: all")
    arguments.add_argument("--batches", default="1,8,32", help="requests that run at once")
    arguments.add_argument("--rounds", type=int, default=5, help="runs of each case on each engine")
    args = arguments.parse_args()
    sizes = BenchSizes("--batches", CONTEXT, 32)
    words = shlex.split(args.flags.replace("=", " "))
    flags = {words[i].removeprefix("--").replace("-", "_"): words[i + 1] for i in range(0, len(words), 2)}
    off = prepare_sized(args.model, {**flags, "speculation": "off"}, sizes)
    on = prepare_sized(args.model, {**flags, "speculation": args.speculation}, sizes)
    rows = asyncio.run(measure(off, on, args))
    result = {
        "benchmark": "speculation",
        "model": Path(args.model).name,
        "flags": args.flags,
        "speculation": args.speculation,
        "least_decode_ratio": min(row["decode_ratio"] for row in rows),
        "cases": rows,
    }
    save(result, args.json)
    write(result, None)


if __name__ == "__main__":
    main()
