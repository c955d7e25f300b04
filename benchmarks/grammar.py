"""Measures what grammars cost: the masks of a step, and the time to compile a schema.

    python benchmarks/grammar.py MODEL [--tokenizer GGUF] [--rows 1,8,32] [--schemas 200] [--threads 2] [--json FILE]

MODEL is a model's folder or GGUF file. A model of make_model.py has a small tokenizer: `--tokenizer` names another
model's, such as ggml-vocab-qwen2.gguf in the sources of llama-cpp-python, which has 151,936 tokens. Every row has a
schema of its own, of about 5 kB, and follows an instance of it token by token. `mask_ms` is the time to fill in the
masks of all rows for a step on `--threads` threads; `cpu_ms` is the processor time of that, which other processes do
not add to. `take_ms` is the time to go on by a token in each row. `compile_ms` is the engine's processor time for one
schema, `check_ms` the time of the process that checks it for the server, round trip included.
`step_ms` is the time of a decode step of the model with as many sequences, 256 tokens of context each and no grammar,
in the same run; `mask_share` is what the mean masks add to it. A CPU fills in masks before it computes.
`loop_ms` is the longest pause of an event loop during these checks, one hostile schema among them. The loop is the
server's and never sleeps. `idle_loop_ms` is its longest pause in as much time without checks: what the machine adds.
"""

import asyncio
import gc
import json
import random
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import uvloop
from op_timing.step_timer import StepTimer, longest_sequence
from results import parser, write

from penstock.bench.roofline import MachineRates
from penstock.cli.bench.sizes import BenchSizes, prepare_sized
from penstock.messages import Grammar
from penstock.runtime.loading.cpu import load_cpu_runner
from penstock.text import GrammarChecker, GrammarError, Tokenizer
from penstock.text.grammars.matchers import GrammarMatchers

T = TypeVar("T")
WORDS = ["order", "customer", "invoice", "address", "total", "shipped", "status", "quantity", "article", "comment"]
CONTEXT, STEPS = 256, 20  # of the timed decode steps: tokens of a sequence, and how many
HOSTILE = {"allOf": [{"type": "string", "pattern": f".*x{i}.*y{i}.*"} for i in range(50)]}


def some_schema(source: random.Random, size: int) -> tuple[dict[str, Any], Any]:
    """A schema of about `size` bytes, and an instance of it."""
    properties: dict[str, Any] = {}
    instance: dict[str, Any] = {}
    while len(json.dumps(properties)) < size:
        name = f"{source.choice(WORDS)}_{len(properties)}"
        words = [source.choice(WORDS) for _ in range(8)]
        low = source.randint(0, 100)
        schema, value = source.choice(
            [
                ({"type": "string", "maxLength": 80}, " ".join(words[:5])),
                ({"type": "string", "format": "date"}, "2024-05-17"),
                ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"}, f"AB-{source.randint(1000, 99999)}"),
                ({"type": "integer", "minimum": low, "maximum": low + 5000}, low + 17),
                ({"type": "number"}, 12.75),
                ({"enum": sorted(set(words))}, words[0]),
                ({"type": "boolean"}, True),
                ({"type": "array", "items": {"type": "string"}, "maxItems": 5}, words[:3]),
                (
                    {"type": "object", "properties": {"id": {"type": "integer"}, "note": {"type": "string"}}},
                    {"id": 4711, "note": "as discussed"},
                ),
                ({"anyOf": [{"type": "null"}, {"type": "string", "minLength": 1}]}, "perhaps"),
            ]
        )
        properties[name] = {"description": " ".join(words), **schema}
        instance[name] = value
    required = [name for name in properties if source.random() < 0.9]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }, {name: instance[name] for name in properties if name in required}


def spread(seconds: list[float]) -> dict[str, float]:
    """Mean, median and 99th percentile in milliseconds."""
    ms = np.array(seconds) * 1e3
    return {
        "mean": round(float(ms.mean()), 4),
        "p50": round(float(np.median(ms)), 4),
        "p99": round(float(np.percentile(ms, 99)), 4),
    }


def masks(matchers: GrammarMatchers, tokenizer: Tokenizer, made: list[tuple[Any, Any]], width: int) -> dict[str, Any]:
    """The masks of steps in which every row has a schema of its own."""
    rows = [matchers.matcher(Grammar("json_schema", json.dumps(schema)), []) for schema, _ in made]
    texts = [tokenizer.encode(json.dumps(value), add_special_tokens=False) for _, value in made]
    words = np.zeros((len(rows), -(-width // 32)), np.int32)
    filled, taken, worked = [], [], []
    for i in range(min(map(len, texts))):
        began, before = time.perf_counter(), time.process_time()
        matchers.fill([(row, ()) for row in rows], words)
        middle = time.perf_counter()
        worked.append(time.process_time() - before)
        for row, text in zip(rows, texts, strict=True):
            row.take([text[i]])
        taken.append(time.perf_counter() - middle)
        filled.append(middle - began)
    errors = [row.error for row in rows if row.error]
    assert not errors, errors[0]
    return {
        "rows": len(rows),
        "steps": len(filled),
        "mask_ms": spread(filled),
        "cpu_ms": spread(worked),
        "take_ms": spread(taken),
    }


def step_seconds(model: Path, rows: list[int]) -> list[float]:
    """The median time of a decode step of each number of sequences."""
    sizes = BenchSizes("--rows", longest_sequence(CONTEXT, rows, STEPS), max(rows))
    runner = load_cpu_runner(prepare_sized(str(model), {}, sizes).resolved.engine)
    timed = StepTimer(runner, CONTEXT, rows, STEPS).measure(MachineRates(1.0, 1.0))
    return [each.wall_us / 1e6 for each in timed]


async def longest_pause(work: Awaitable[T]) -> tuple[T, float]:
    """The result of `work`, and the longest pause of the event loop meanwhile, in seconds."""
    task, longest, last = asyncio.ensure_future(work), 0.0, time.perf_counter()
    while not task.done():
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return task.result(), longest


async def checks(checker: GrammarChecker, schemas: list[str]) -> tuple[list[float], float, float]:
    """The seconds of each check, the longest pause of the event loop meanwhile, and its longest one without checks."""

    async def check_all() -> list[float]:
        seconds = []
        for schema in schemas:
            began = time.perf_counter()
            try:
                await checker.check("json_schema", schema)
                seconds.append(time.perf_counter() - began)
            except GrammarError:
                assert schema == json.dumps(HOSTILE)
        return seconds

    await checker.check("regex", "a")  # starts the process
    gc.freeze()  # as a server does when it is ready: a collection would walk over the vocabulary
    began = time.perf_counter()
    seconds, pause = await longest_pause(check_all())
    _, idle_pause = await longest_pause(asyncio.sleep(time.perf_counter() - began))
    return seconds, pause, idle_pause


def main() -> None:
    options = parser(__doc__)
    options.add_argument("model", type=Path)
    options.add_argument("--tokenizer", type=Path, help="another model's folder or GGUF file, for its tokenizer")
    options.add_argument("--rows", default="1,8,32")
    options.add_argument("--schemas", type=int, default=200)
    options.add_argument("--bytes", type=int, default=5000)
    options.add_argument("--threads", type=int, default=2)
    args = options.parse_args()
    tokenizer = Tokenizer.load(args.tokenizer or args.model)
    width, eos = tokenizer.vocab_size, [tokenizer.eos_token_id or 0]
    source = random.Random(1)
    made = [some_schema(source, args.bytes) for _ in range(args.schemas)]
    texts = [json.dumps(schema) for schema, _ in made]
    checker = GrammarChecker(tokenizer, width, eos)
    # Before the model runs, since kernels stay on a processor each, and with them this thread and what it starts.
    checked, pause, idle_pause = uvloop.run(checks(checker, [*texts[:20], json.dumps(HOSTILE), *texts[20:]]))
    checker.close()
    matchers = GrammarMatchers(lambda: tokenizer, width, eos, threads=args.threads)
    matchers.matcher(Grammar("regex", "a"), [])  # loads the vocabulary
    compiled = []
    for schema, _ in made:
        began = time.process_time()
        matchers.matcher(Grammar("json_schema", json.dumps(schema)), [])
        compiled.append(time.process_time() - began)
    counts = [int(rows) for rows in args.rows.split(",")]
    figures = [masks(matchers, tokenizer, made[:rows], width) for rows in counts]
    for figure, seconds in zip(figures, step_seconds(args.model, counts), strict=True):
        figure["step_ms"] = round(seconds * 1e3, 3)
        figure["mask_share"] = round(figure["mask_ms"]["mean"] / figure["step_ms"], 4)
    result = {
        "benchmark": "grammar",
        "model": args.model.name,
        "tokenizer": (args.tokenizer or args.model).name,
        "vocab": width,
        "threads": args.threads,
        "schemas": args.schemas,
        "schema_bytes": round(float(np.mean([len(text) for text in texts]))),
        "compile_ms": spread(compiled),
        "check_ms": spread(checked),
        "loop_ms": round(pause * 1e3, 2),
        "idle_loop_ms": round(idle_pause * 1e3, 2),
        "masks": figures,
    }
    write(result, args.json)


if __name__ == "__main__":
    main()
