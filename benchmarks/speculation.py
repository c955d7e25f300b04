"""Compares decoding with speculation and without it, on text that repeats its prompt and on text that does not.

    python benchmarks/speculation.py MODEL --json benchmarks/results/avx512/speculation.json

Three engines have the model loaded; one of them speculates, the other two do not. A turn runs a case on each, in an
order that changes, with the same prompts, seeds and a cache salt of its own: nothing of an earlier turn helps a later
one. All give the same tokens, else the benchmark fails. `ratio` is the median over the turns of the rate with
speculation over the rate without; `decode_ratio` leaves the prefill out. `control` is the decode ratio of the two
engines without speculation in the same turns: what the machine alone makes of it. The intervals of the medians cover
95% (order statistics, no assumption on the distribution). `slower`: the interval of `decode_ratio` lies below 0.97.
`accepted_per_step` is the mean number of drafts accepted where a step has drafts.

The copies are what speculation is made for: a file repeated with one change, and a document quoted. `quote` gives the
answer's first eight words: without them, SmolLM2 says what the document is about. `extract` gives none and lets it
choose sentences: it copies some, changes others, and repeats itself. The other cases check that speculation costs
nothing where it cannot help.
"""

import asyncio
import colorsys
import inspect
import random
import shlex
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

from before_after import interval
from results import parser, save, write

from penstock.bench.workload import random_prompt
from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.engine.launch import launch
from penstock.engine.processors import keep_off
from penstock.messages import EngineClient, EngineStats, GenerateRequest, SamplingParams
from penstock.prepare.model import PreparedModel
from penstock.text import Tokenizer

PAUSE = 0.1  # seconds before a run: the other engine's native threads spin for about 1 ms after a step, then sleep
CONTEXT = 2048
LEAST_RATIO = 0.97  # of the rate without speculation
OFF, CONTROL, ON = range(3)  # the engines
# Functions that a small model copies faithfully.
SOURCES = (textwrap.dedent, colorsys.rgb_to_hls, shlex.quote, colorsys.hls_to_rgb)
DOCUMENTS = (
    "The bridge over the river Alm was opened in 1874. It was built of stone by forty masons, who worked for six "
    "years. In the winter of 1881 a flood destroyed two of its five arches. The town had no money to repair them, "
    "so people crossed the river by ferry until 1889. Since then the bridge has carried carts, trams and cars. In "
    "1967 the trams were replaced by buses. The bridge was closed to cars in 2003, and today only cyclists and "
    "walkers cross it.",
    "The library opens at nine in the morning and closes at seven in the evening. On Sundays it is closed. "
    "Members may borrow up to twelve books for four weeks. A book can be renewed twice, unless another member has "
    "asked for it. Films may be borrowed for one week. Whoever returns a book late pays twenty cents for each "
    "day. Children under twelve pay nothing. The reading room on the second floor has forty desks, and none of "
    "them can be reserved.",
    "Barn owls hunt at night over open fields. They hear so well that they can catch a mouse in complete "
    "darkness. Their feathers have soft edges, so their flight makes no sound. A pair of barn owls eats about "
    "four thousand mice in a year. They nest in hollow trees, in church towers and in old barns. The female lays "
    "four to seven eggs in spring, and sits on them for a month. The young owls leave the nest when they are two "
    "months old.",
    "The seller repairs or replaces the device free of charge if it fails within two years of the purchase. The "
    "warranty does not cover batteries, damage by water, or repairs by anyone but the seller. To use the "
    "warranty, send the device with a copy of the invoice to the address on the back page. The seller pays for "
    "the return. If the device cannot be repaired within thirty days, the customer may withdraw from the "
    "contract and gets the price back.",
    "Mix five hundred grams of flour with ten grams of salt and seven grams of dry yeast. Add three hundred and "
    "twenty millilitres of warm water and knead the dough for ten minutes. Cover it with a cloth and let it rest "
    "for one hour. Then form a loaf, put it on a tray and cut its top three times with a sharp knife. Bake it at "
    "two hundred and thirty degrees for thirty five minutes. The loaf is done when it sounds hollow if you knock "
    "on its bottom.",
    "Minutes of the meeting on 14 March. Present: Anna Berg, Luis Ortega, Mei Tanaka and Paul Novak. The budget "
    "for the new server room was approved with three votes to one. Luis will order the racks by the end of "
    "April. Mei reported that the backup of the archive failed twice in February; the cause was a full disk. "
    "Paul will write a monitor for it. The next meeting is on 11 April at ten o'clock in room 204.",
    "Mount Tarn last erupted in 1912. The eruption lasted for nine days and covered the valley with thirty "
    "centimetres of ash. All four villages at its foot were abandoned, and only two of them were built again. "
    "Since 1958 a station on the eastern slope has measured the movements of the ground. In a usual year it "
    "counts about two hundred small earthquakes. Scientists expect that a new eruption would announce itself by "
    "several thousand of them within a few weeks.",
    "The tenant pays the rent of 840 euros by the third working day of each month. The deposit is two months of "
    "rent and is returned within six weeks after the end of the contract. Either side may end the contract in "
    "writing with three months of notice. Pets other than small animals in cages need the written consent of the "
    "landlord. The tenant must let the landlord inspect the flat once a year, after notice of at least one week.",
)
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

    def chat(text: str, answer: str = "") -> tuple[int, ...]:
        """A question, and the beginning of its answer."""
        template = tokenizer.chat_template
        assert template is not None, "the model has no chat template"
        messages = [{"role": "user", "content": text}]
        whole = template.render(messages, add_generation_prompt=True) + answer
        return tuple(tokenizer.encode(whole, add_special_tokens=False))

    def edit(batch: int, source: random.Random, predicted: bool = False) -> list[Item]:
        items = []
        start = source.randrange(len(SOURCES))
        for i in range(batch):
            text = inspect.getsource(SOURCES[(start + i) % len(SOURCES)])
            old = text.partition("(")[0].split()[-1]
            head = "".join(text.splitlines(keepends=True)[:2]).rstrip()
            ask = f"Repeat this file exactly, but with `{old}_v2` in place of `{old}`:\n\n```python\n{text}```"
            begun = head.replace(old, f"{old}_v2")
            rest = tokenizer.encode(text[len(head) :] + "```", add_special_tokens=False) if predicted else ()
            items.append(Item(chat(ask, f"```python\n{begun}"), tuple(rest), 0.0, 512, False))
        return items

    def quote(batch: int, source: random.Random) -> list[Item]:
        items = []
        for _ in range(batch):
            text = source.choice(DOCUMENTS)
            ask = f"{text}\n\nWhat does this document say? Answer with its own words, all of them, in their order."
            items.append(Item(chat(ask, " ".join(text.split()[:8])), (), 0.0, 256, False))
        return items

    def extract(batch: int, source: random.Random) -> list[Item]:
        ask = "Extract the key sentences of this document, word for word, as a list."
        return [Item(chat(f"{source.choice(DOCUMENTS)}\n\n{ask}"), (), 0.0, 256, False) for _ in range(batch)]

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
        "extract": extract,
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


def summary(case: str, batch: int, turns: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """The figures of a case. A turn has a run of each engine."""
    on = [turn[ON] for turn in turns]
    drafts, drafted, accepted = (
        sum(counts) for counts in zip(*((run.drafts, run.draft_tokens, run.accepted) for run in on), strict=True)
    )
    decode = [turn[ON].decode_rate / turn[OFF].decode_rate for turn in turns]
    control = [turn[CONTROL].decode_rate / turn[OFF].decode_rate for turn in turns]
    ratios = {"ratio": [turn[ON].rate / turn[OFF].rate for turn in turns], "decode_ratio": decode, "control": control}
    figures: dict[str, Any] = {"case": case, "batch": batch, "turns": len(turns), "coverage": interval(decode)[2]}
    for name, values in ratios.items():
        figures[name] = round(statistics.median(values), 3)
        figures[f"{name}_interval"] = [round(value, 3) for value in interval(values)[:2]]
    return figures | {
        "slower": interval(decode)[1] < LEAST_RATIO,
        "decode_ratios": [round(value, 3) for value in decode],
        "tok_s_off": round(statistics.median(turn[OFF].decode_rate for turn in turns), 1),
        "tok_s_on": round(statistics.median(run.decode_rate for run in on), 1),
        "tokens_per_step": round(sum(len(tokens) for run in on for tokens in run.tokens) / sum(r.steps for r in on), 2),
        "drafted_per_step": round(drafted / max(drafts, 1), 2),
        "accepted_per_step": round(accepted / max(drafts, 1), 2),
        "acceptance": round(accepted / max(drafted, 1), 3),
    }


async def measure(off: PreparedModel, on: PreparedModel, args: Any) -> list[dict[str, Any]]:
    tokenizer = Tokenizer.load(on.path)
    async with AsyncExitStack() as stack:
        clients = []
        for prepared in (off, off, on):
            client = await launch(prepared.resolved.engine)
            stack.push_async_callback(client.close)
            clients.append(client)
        rows = []
        chosen = cases(tokenizer, clients[0].info.vocab_size)
        for name in args.cases.split(";") if args.cases else chosen:
            for batch in map(int, args.batches.split(",")):
                turns = []
                for number in range(args.turns + 1):
                    items = chosen[name](batch, random.Random(f"{name} {batch} {number}"))
                    order = [(number + i) % 3 for i in range(3)][:: -1 if number % 2 else 1]
                    runs = {i: await run(clients[i], items, f"{name}-{batch}-{number}") for i in order}
                    if not runs[OFF].tokens == runs[CONTROL].tokens == runs[ON].tokens:
                        raise RuntimeError(f"{name}, batch {batch}: speculation changed the tokens")
                    if number:  # the first one warms up, and measures steps
                        turns.append([runs[i] for i in (OFF, CONTROL, ON)])
                rows.append(summary(name, batch, turns))
                print(rows[-1], flush=True)
        return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("model", help="a model with a chat template")
    arguments.add_argument("--flags", default="", help="of both engines")
    arguments.add_argument("--speculation", default="suffix", help="of the engine that speculates")
    arguments.add_argument("--cases", default="", help="names with semicolons between them; default: all")
    arguments.add_argument("--batches", default="1,8,32", help="requests that run at once")
    arguments.add_argument("--turns", type=int, default=10, help="runs of each case on each engine")
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
        "slower": [f"{row['case']}, batch {row['batch']}" for row in rows if row["slower"]],
        "cases": rows,
    }
    save(result, args.json)
    write(result, None)


if __name__ == "__main__":
    main()
