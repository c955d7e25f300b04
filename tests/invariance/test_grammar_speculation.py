"""Sequences with a grammar and without one, with speculative tokens: the same outputs as without these."""

import random
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.messages import GenerateRequest, Grammar, SamplingParams, Thinking
from tests.checkpoints import write_tiny_checkpoint
from tests.invariance import test_batch_invariance as batches
from tests.runtime.byte_tokens import END, OTHER_END, ByteTokens, grammars, text_of

FIXED = "(ab|cd)d1c2ba4132(1|2)dcab3214dcba(a|b)"  # between choices there is only one way to go on
PATTERN = "((ab|cd|12|ba){2}){10,12}"
THINKING = Thinking(9, "ab", "d" * 3, opened=True)
LETTERS = (97, 98, 99, 100, 49, 50)


def repeating(seed: int) -> GenerateRequest:
    """A prompt that repeats itself, for a small model that goes on repeating. Every second request has a grammar, and
    every fifth one a budget of thinking."""
    choose = random.Random(seed)
    phrase = [choose.choice(LETTERS) for _ in range(6)]
    sampling = SamplingParams(
        seed=seed,
        max_tokens=50,
        temperature=(0.0, 0.3, 0.05)[seed % 3],
        eos_token_ids=(END, OTHER_END),
        logprobs=1 if seed % 4 == 0 else None,
    )
    grammar = Grammar("regex", PATTERN) if seed % 2 else None
    if seed % 5 == 0:
        grammar = Grammar("any", "", thinking=THINKING)
    return GenerateRequest(
        request_id=str(seed),
        prompt_ids=tuple(phrase * 4),
        sampling=sampling,
        grammar=grammar,
        tenant=str(seed % 7),
    )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> batches.Machine:
    """A machine whose runners hold outputs to grammars."""
    load = batches.load_runner

    def load_with_grammars(*arguments: Any, **options: Any) -> Any:
        runner = load(*arguments, **options)
        runner.use_grammars(grammars())
        return runner

    monkeypatch.setattr(batches, "load_runner", load_with_grammars)
    return batches.Machine(write_tiny_checkpoint("qwen3", tmp_path / "model"))


def test_what_a_grammar_forces_is_verified_as_drafts(machine: batches.Machine) -> None:
    sampling = [
        SamplingParams(seed=i, max_tokens=50, temperature=i % 2, eos_token_ids=(END, OTHER_END)) for i in range(12)
    ]
    wave = [
        GenerateRequest(request_id=str(i), prompt_ids=(97, 98 + i), sampling=each, grammar=Grammar("regex", FIXED))
        for i, each in enumerate(sampling)
    ]
    expected = machine.run([wave])
    assert all(re.fullmatch(FIXED, text_of(tokens)) for tokens in expected.values())
    assert machine.accepted == 0
    assert machine.run([wave], speculation="ngram") == expected
    assert machine.accepted > len(wave) * 12  # of 21 that are forced; a plain step is measured first


def test_speculation_changes_no_token_beside_grammars(machine: batches.Machine) -> None:
    wave = [repeating(seed) for seed in range(60)]
    expected, scores = machine.run([wave], seqs=32), machine.logprobs
    with_grammar = [request for request in wave if request.grammar is not None]
    for request in with_grammar:
        assert request.grammar is not None
        if request.grammar.kind == "any":
            tokens = expected[request.request_id][:12]
            assert b"ddd" in b"".join(map(ByteTokens().token_bytes, tokens))
            continue
        assert re.fullmatch(PATTERN, text_of(expected[request.request_id]))
    for method in ("ngram", "suffix"):
        for how in ({}, {"blocks": 40, "budget": 64}):
            assert machine.run([wave], seqs=16, speculation=method, **how) == expected
            assert machine.logprobs == scores
            assert machine.accepted > 20
    own = {request.request_id: expected[request.request_id] for request in with_grammar}
    assert machine.run([with_grammar], seqs=16, speculation="suffix") == own
    assert machine.accepted > 5
