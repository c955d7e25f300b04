"""A budget of thinking is exact, however its requests are served, and other rows are left alone."""

import re
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.messages import GenerateRequest, Grammar, Thinking
from tests.invariance.test_batch_invariance import requests
from tests.models.serving import Server, make_device_runner, make_runner
from tests.runtime.byte_tokens import END, OTHER_END, ByteTokens
from tests.runtime.sampling.test_grammars import Checkpoint, holding
from tests.runtime.test_device_runner import answers, assert_same
from tests.schedule.invariants import check_scheduler

# A model with random weights writes the markers "a" and "b" often, and "</think>" only if it must.
SHORT = Thinking(5, "a", "b")
KINDS = (
    Grammar("any", "", thinking=Thinking(7, "<think>", "</think>", opened=True)),
    Grammar("any", "", thinking=SHORT),
    Grammar("any", "", thinking=replace(SHORT, opened=True, answers=("12", "1cd"))),
    Grammar("regex", "[a-d]{3,9}", "</think>", Thinking(0, "<think>", "</think>", opened=True)),
    Grammar("regex", "[a-d]{3,9}", "</think>", Thinking(12, "<think>", "</think>", opened=True)),
)
SCENARIOS: dict[str, dict[str, Any]] = {
    "together": {},
    "in chunks": {"budget": 24},
    "preempted": {"blocks": 14},
    "one": {"max_num_seqs": 1, "budget": 8},
}


def wave(count: int = 20) -> list[GenerateRequest]:
    """Every other request has a budget. Greedy and drawn, with edits, logprobs and several choices."""
    often = {ord("a"): 5.0, ord("b"): 3.0, ord("<"): 2.0}
    made = []
    for i, each in enumerate(requests("qwen3")[:count]):
        grammar = KINDS[i // 2 % len(KINDS)] if i % 2 else None
        sampling = replace(
            each.sampling,
            eos_token_ids=(END, OTHER_END),
            ignore_eos=grammar is None or not grammar.trigger,
            max_tokens=60 if grammar else 12,
            logit_bias=often if grammar is not None and i % 3 else {},
            logprobs=2 if i % 4 == 1 else None,
        )
        made.append(replace(each, sampling=sampling, grammar=grammar, n=3 if i % 7 == 3 else 1))
    return made


def check(grammar: Grammar, token_ids: tuple[int, ...]) -> int:
    """Checks one output by its bytes; returns how many tokens of it are reasoning."""
    thinking, texts = grammar.thinking, [ByteTokens().token_bytes(i) for i in token_ids]
    assert thinking is not None
    begin, end = thinking.begin.encode(), thinking.end.encode()
    on, spent, forced, text = thinking.opened, 0, 0, b""
    for each in texts:
        text += each
        if on and end in text:
            on, text = False, text.partition(end)[2]
            assert spent <= thinking.budget
        elif on and not (spent == thinking.budget and end.startswith(text[-forced - 1 :])):
            spent, forced = spent + 1, 0
            assert spent <= thinking.budget, b"".join(texts)
        elif on:
            forced += 1
        elif begin in text:
            on, text = True, text.partition(begin)[2]
    if grammar.trigger and token_ids and token_ids[-1] in (END, OTHER_END):
        _, ended, answer = b"".join(texts[:-1]).partition(end)
        assert not ended or re.fullmatch(grammar.text.encode(), answer), answer
    return spent


@pytest.mark.parametrize(
    ("way", "scenario"),
    [
        *(("recorded", scenario) for scenario in SCENARIOS),
        *(("ahead, captured", scenario) for scenario in SCENARIOS),
        ("eager", "preempted"),
    ],
)
def test_budgets_hold(way: str, scenario: str, tiny_checkpoint: Checkpoint) -> None:
    """On a CPU, and two plans ahead, where masks come late. All give the same tokens."""
    folder, asked = tiny_checkpoint("qwen3"), wave()
    runner = {
        "recorded": lambda: make_runner(folder),
        "eager": lambda: make_runner(folder, recorded=False),
        "ahead, captured": lambda: make_device_runner(folder),
    }[way]()
    server = Server(holding(runner), **SCENARIOS[scenario])
    deltas = server.run(asked)
    given, spent = answers(deltas), set()
    for request in asked:
        for choice in range(request.n):
            answer = given[request.request_id, choice]
            assert not answer.error
            if request.grammar is not None:
                spent.add((KINDS.index(request.grammar), check(request.grammar, answer.tokens)))
    assert {(0, 7), (1, 5), (2, 5), (3, 0), (4, 12)} <= spent, spent
    assert_same(deltas, Server(holding(make_runner(folder))).run(asked))
    if scenario == "preempted":
        assert server.scheduler.stats().preemptions > 0
    check_scheduler(server.scheduler)


def test_a_budget_that_is_not_spent_changes_nothing(tiny_checkpoint: Checkpoint) -> None:
    """Nor does one whose marker never comes. Up to the end of the budget the output is what it would have been."""
    folder = tiny_checkpoint("qwen3")
    plain = [replace(request, grammar=None) for request in wave()]
    free = answers(Server(make_runner(folder)).run(plain))
    for budget in (1000, 4):
        thinking = Thinking(budget, "<think>", "</think>", opened=True)
        asked = [replace(request, grammar=Grammar("any", "", thinking=thinking)) for request in plain]
        for runner in (make_runner(folder), make_device_runner(folder)):
            given = answers(Server(holding(runner)).run(asked))
            assert all(given[key].tokens[:budget] == free[key].tokens[:budget] for key in free)
            if budget == 4:
                cut = [b"".join(map(ByteTokens().token_bytes, each.tokens[:12])) for each in given.values()]
                assert all(b"</think>" in text for text in cut if len(text) >= 12)


def test_an_output_goes_on_from_any_token(tiny_checkpoint: Checkpoint) -> None:
    """As after a crash: in reasoning, within the marker that ends it, and after it."""
    server = Server(holding(make_runner(tiny_checkpoint("qwen3"))))
    for kind in KINDS:
        whole = replace(wave(1)[0], grammar=kind, request_id="whole")
        whole = replace(whole, sampling=replace(whole.sampling, max_tokens=40))
        tokens = answers(server.run([whole]))["whole", 0].tokens
        parts = [replace(whole, request_id=str(i), output_ids=tokens[:i]) for i in range(1, len(tokens))]
        given = answers(server.run(parts))
        for i, part in enumerate(parts, 1):
            assert part.output_ids + given[str(i), 0].tokens == tokens
