"""A model with random weights writes what generated schemas ask for. `jsonschema` finds nothing wrong with it."""

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from penstock.messages import GenerateRequest, Grammar, SamplingParams
from penstock.schedule import Scheduler, SchedulerConfig
from tests.bounded_schemas import bounded_schemas
from tests.models.serving import Server, make_runner
from tests.runtime.byte_tokens import END, OTHER_END, grammars, text_of
from tests.runtime.test_device_runner import answers

MAX_LEN = 1024


@pytest.mark.rare
def test_random_weights_write_what_schemas_ask_for(tiny_checkpoint: Callable[..., Path]) -> None:
    runner = make_runner(tiny_checkpoint("qwen3"), max_model_len=MAX_LEN)
    runner.use_grammars(grammars())
    server = Server(runner)
    config = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=MAX_LEN)
    server.scheduler = Scheduler(config, runner.capacity)
    schemas = [schema for schema, unsupported in bounded_schemas() if not unsupported]
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
    assert finished >= 0.95 * len(schemas)
