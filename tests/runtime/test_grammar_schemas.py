"""A model with random weights writes what 500 generated schemas ask for. `jsonschema` finds nothing wrong with it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from penstock.messages import GenerateRequest, Grammar, SamplingParams
from penstock.schedule import Scheduler, SchedulerConfig
from tests.models.serving import Server, make_runner
from tests.runtime.byte_tokens import END, OTHER_END, grammars, text_of
from tests.runtime.test_device_runner import answers

MAX_LEN = 1024
PATTERNS = ["^[a-f]{2,5}$", r"^\d{3}-[A-Z]+\d$", "^(x|yy){1,3}$"]
VALUES = [1, "one", None, True, [2, "é"], {"k": 1}, 'q"\\']


def some_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """A bounded schema: of strings, numbers, choices, and at the top of objects and lists."""
    kinds = ["string", "pattern", "format", "integer", "number", "enum", "boolean", "anyOf", "null"]
    kind = source.choice(["object", "object", "array", *(kinds if depth else [])] if depth < 3 else kinds)
    if kind == "object":
        names = source.sample(["a", "name", "id 1", "é", "x-y", "long_name_of_a_property"], source.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: some_schema(source, depth + 1) for name in names},
            "required": [name for name in names if source.random() < 0.7],
            "additionalProperties": False,
        }
    if kind == "array":
        low = source.randint(0, 2)
        return {"type": "array", "items": some_schema(source, depth + 1), "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [some_schema(source, depth + 1) for _ in range(source.randint(1, 3))]}
    low = source.randint(-50, 50)
    return {
        "string": lambda: {"type": "string", "minLength": source.randint(0, 3), "maxLength": source.randint(3, 12)},
        "pattern": lambda: {
            "type": "string",
            "pattern": source.choice(["^[a-f]{2,5}$", r"^\d{3}-[A-Z]+\d$", "^(x|yy){1,3}$"]),
        },
        "format": lambda: {"type": "string", "format": source.choice(["email", "uuid", "ipv4"])},
        "integer": lambda: {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 5000)},
        "number": lambda: {"type": "number", "minimum": low, "exclusiveMaximum": low + 10},
        "enum": lambda: {"enum": source.sample(VALUES, source.randint(1, 5))},
        "boolean": lambda: {"type": "boolean"},
        "null": lambda: {"type": "null"},
    }[kind]()


@pytest.mark.rare
def test_random_weights_write_what_schemas_ask_for(tiny_checkpoint: Callable[..., Path]) -> None:
    runner = make_runner(tiny_checkpoint("qwen3"), max_model_len=MAX_LEN)
    runner.use_grammars(grammars())
    server = Server(runner)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=MAX_LEN)
    server.scheduler = Scheduler(config, runner.capacity)
    source = random.Random(1)
    schemas = [some_schema(source) for _ in range(500)]
    sampling = SamplingParams(seed=0, max_tokens=MAX_LEN - 8, eos_token_ids=(END, OTHER_END))
    asked = [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=(i % 256, 7),
            sampling=replace(sampling, seed=i, temperature=0.0 if i % 5 == 0 else 1.0),
            grammar=Grammar("json_schema", json.dumps(schema)),
        )
        for i, schema in enumerate(schemas)
    ]
    given = answers(server.run(asked))
    finished = 0
    for i, schema in enumerate(schemas):
        answer = given[str(i), 0]
        assert not answer.error, (schema, answer.error)
        if answer.reason == "stop":
            finished += 1
            text = text_of(answer.tokens)
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    assert finished >= 475
