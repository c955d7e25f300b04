"""Outputs obey their grammars, however their requests are served, and other rows are left alone.

The models have random weights, so no token is likely to be right by itself. The masks are llguidance's; what is allowed
is decided here by Python's `re` and by `jsonschema`.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec.structs import replace

from penstock.kernels.batch_arrays import ALL_BANNED
from penstock.messages import GRAMMAR_TOO_COMPLEX, GenerateRequest, Grammar, SamplingParams
from penstock.runtime.in_flight import STATUS_ERRORS
from penstock.runtime.runner import ModelRunner
from tests.invariance.test_batch_invariance import requests
from tests.models.serving import Server, make_device_runner, make_runner
from tests.runtime.byte_tokens import END, OTHER_END, VOCAB, grammars, text_of
from tests.runtime.test_device_runner import Answer, answers, assert_same
from tests.schedule.invariants import check_scheduler

Checkpoint = Callable[..., Path]

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["ab", "cd"]},
        "count": {"type": "integer", "minimum": -5, "maximum": 1200},
        "flags": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "count", "flags"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", "[a-d]{3,9}(é|12)"),
    Grammar("lark", 'start: "yes" | "no" | ("ab" | "cd"){2,6}'),
)
SCENARIOS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"budget": 24},
    "preempted": {"blocks": 14},
    "from the cache": {"caching": True, "blocks": 100, "budget": 60},
    "one": {"max_num_seqs": 1, "budget": 8},
}


def wave(count: int = 14) -> list[GenerateRequest]:
    """Every other request has a grammar. Greedy and drawn in every way, with edits, logprobs and several choices."""
    extras: tuple[dict[str, Any], ...] = (
        {},
        {"logprobs": 2},
        {"logit_bias": {ord("b"): 2.0, END: -3.0}},
        {"repetition_penalty": 1.3, "min_tokens": 3, "logprobs": 2},
        {"prompt_logprobs": 1},
    )
    made = []
    for i, each in enumerate(requests("qwen3")[:count]):
        grammar = GRAMMARS[i // 2 % len(GRAMMARS)] if i % 2 else None
        ends = {"eos_token_ids": (END, OTHER_END), "ignore_eos": False, "max_tokens": 110 if grammar else 12}
        sampling = replace(each.sampling, **{**ends, **extras[i % len(extras)]})
        made.append(replace(each, sampling=sampling, grammar=grammar, n=3 if i % 7 == 3 else 1))
    return made


def holding(runner: ModelRunner) -> ModelRunner:
    runner.use_grammars(grammars())
    return runner


def check(grammar: Grammar, answer: Answer) -> None:
    """A whole output obeys its grammar."""
    text = text_of(answer.tokens)
    assert answer.reason == "stop", (answer, text)
    if grammar.kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(grammar.text))
    elif grammar.kind == "regex":
        assert re.fullmatch(grammar.text, text), text
    else:
        assert re.fullmatch("yes|no|(ab|cd){2,6}", text), text


def check_all(asked: list[GenerateRequest], given: dict[tuple[str, int], Answer]) -> None:
    for request in asked:
        for choice in range(request.n):
            if request.grammar is not None:
                check(request.grammar, given[request.request_id, choice])


@pytest.mark.parametrize(
    ("way", "scenario"),
    [
        *(("recorded", scenario) for scenario in SCENARIOS),
        *(("ahead, captured", scenario) for scenario in SCENARIOS),
        ("eager", "preempted"),
        ("ahead", "preempted"),
    ],
)
def test_outputs_obey(way: str, scenario: str, tiny_checkpoint: Checkpoint) -> None:
    """On a CPU, and two plans ahead, where masks come late. All give the same tokens."""
    folder, how, asked = tiny_checkpoint("qwen3"), SCENARIOS[scenario], wave()
    runner = {
        "recorded": lambda: make_runner(folder),
        "eager": lambda: make_runner(folder, recorded=False),
        "ahead": lambda: make_device_runner(folder, capture=False),
        "ahead, captured": lambda: make_device_runner(folder),
    }[way]()
    server = Server(holding(runner), **how)
    deltas = server.run(asked)
    check_all(asked, answers(deltas))
    assert_same(deltas, Server(holding(make_runner(folder))).run(asked))
    if scenario == "preempted":
        assert server.scheduler.stats().preemptions > 0
    check_scheduler(server.scheduler)


def test_other_rows_get_what_they_get_without_it(tiny_checkpoint: Checkpoint) -> None:
    folder, asked = tiny_checkpoint("qwen3"), wave()
    plain = [request for request in asked if request.grammar is None]
    for runner in (make_runner(folder), make_device_runner(folder)):
        alone = answers(Server(make_runner(folder)).run(plain))
        among = answers(Server(holding(runner)).run(asked))
        assert {key: among[key][:3] for key in alone} == {key: answer[:3] for key, answer in alone.items()}


def test_an_output_goes_on_from_any_token(tiny_checkpoint: Checkpoint) -> None:
    """As after a crash: the rest is what it would have been, and the whole obeys."""
    folder = tiny_checkpoint("qwen3")
    sampling = SamplingParams(seed=3, max_tokens=60, eos_token_ids=(END,))
    whole = GenerateRequest(request_id="whole", prompt_ids=(5, 6, 7), sampling=sampling, grammar=GRAMMARS[0])
    server = Server(holding(make_runner(folder)))
    tokens = answers(server.run([whole]))["whole", 0].tokens
    parts = [replace(whole, request_id=str(i), output_ids=tokens[:i]) for i in range(1, len(tokens))]
    given = answers(server.run(parts))
    for i, part in enumerate(parts, 1):
        assert part.output_ids + given[str(i), 0].tokens == tokens


def test_max_tokens_cuts_an_output(tiny_checkpoint: Checkpoint) -> None:
    sampling = SamplingParams(seed=3, max_tokens=4, eos_token_ids=(END,))
    request = GenerateRequest(request_id="cut", prompt_ids=(5, 6, 7), sampling=sampling, grammar=GRAMMARS[0])
    server = Server(holding(make_runner(tiny_checkpoint("qwen3"))))
    answer = answers(server.run([request]))["cut", 0]
    assert (answer.reason, len(answer.tokens)) == ("length", 4)


@pytest.mark.parametrize("ahead", [False, True])
def test_what_fails_is_the_error_of_its_row(ahead: bool, tiny_checkpoint: Checkpoint) -> None:
    """A grammar that leaves no token, one that is invalid, and one that grows too complex."""
    folder = tiny_checkpoint("qwen3")
    sampling = SamplingParams(seed=3, max_tokens=40, eos_token_ids=(END, OTHER_END))
    base = GenerateRequest(request_id="good", prompt_ids=(5, 6, 7), sampling=sampling, grammar=GRAMMARS[1])
    hungry = Grammar("json_schema", json.dumps({"enum": [{"a": [i, {"b": i}]} for i in range(5000)]}))
    asked = [
        base,
        replace(base, request_id="none", sampling=replace(sampling, min_tokens=30)),
        replace(base, request_id="invalid", grammar=Grammar("regex", "(")),
        replace(base, request_id="complex", grammar=hungry),
    ]
    runner = make_device_runner(folder) if ahead else make_runner(folder)
    given = answers(Server(holding(runner)).run(asked))
    check(GRAMMARS[1], given["good", 0])
    assert given["none", 0].error == STATUS_ERRORS[ALL_BANNED]
    assert "regex parse error" in given["invalid", 0].error
    assert given["complex", 0].error.startswith(GRAMMAR_TOO_COMPLEX)


def test_without_grammars_a_request_for_one_is_an_error(tiny_checkpoint: Checkpoint) -> None:
    asked = wave(2)
    given = answers(Server(make_runner(tiny_checkpoint("qwen3"))).run(asked))
    assert given["0", 0].error == "" and "leave it out" in given["1", 0].error


@pytest.mark.parametrize("ahead", [False, True])
def test_before_its_trigger_a_grammar_changes_nothing(ahead: bool, tiny_checkpoint: Checkpoint) -> None:
    """The first byte that the free output contains twice is the trigger: up to there the output stays the same."""
    folder = tiny_checkpoint("qwen3")
    runner = (make_device_runner if ahead else make_runner)(folder)
    server = Server(holding(runner))
    unlikely = dict.fromkeys(range(128, VOCAB), -100.0)  # the mask allows nothing else where it allows END
    for seed in range(6):
        sampling = SamplingParams(
            seed=seed, max_tokens=50, eos_token_ids=(END, OTHER_END), ignore_eos=True, logit_bias=unlikely
        )
        free = GenerateRequest(request_id=f"free {seed}", prompt_ids=(5, 6, 7), sampling=sampling)
        tokens = answers(server.run([free]))[free.request_id, 0].tokens
        at = next(i for i in range(10, 50) if tokens[i] < 128 and tokens[i] not in tokens[:i])
        held = replace(
            free,
            request_id=f"held {seed}",
            sampling=replace(sampling, ignore_eos=False),
            grammar=Grammar("regex", "[a-d]{3,9}", chr(tokens[at])),
        )
        answer = answers(server.run([held]))[held.request_id, 0]
        assert answer.tokens[: at + 1] == tokens[: at + 1]
        assert re.fullmatch("[a-d]{3,9}", text_of(answer.tokens[at + 1 :])), answer
