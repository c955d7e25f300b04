"""Speculation changes no token: every method, greedy and sampled, preemption mixed in."""

import random
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from penstock.messages import GenerateRequest, SamplingParams
from tests.checkpoints import write_tiny_checkpoint
from tests.invariance.test_batch_invariance import Machine, tiny_vocab
from tests.smollm2 import smollm2

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.05, "logprobs": 2},
    {"temperature": 0.3},
    {"temperature": 0.6, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 8, "min_tokens": 20, "stop_token_ids": tuple(range(0, 300, 17))},
    {"temperature": 0.4, "min_p": 0.02, "frequency_penalty": 0.1, "logprobs": 0},
    {"temperature": 0.0, "stop_token_ids": tuple(range(0, 300, 23))},
)


def asked(vocabulary: int, seeds: int) -> list[GenerateRequest]:
    """Prompts that repeat themselves, in 40 tenants."""
    made = []
    for seed in range(seeds):
        source = random.Random(seed)
        phrase = [source.randrange(vocabulary) for _ in range(source.randint(3, 12))]
        sampling = SamplingParams(seed=seed, max_tokens=40, **WAYS[seed % len(WAYS)])
        request = GenerateRequest(
            request_id=str(seed), prompt_ids=tuple(phrase * source.randint(2, 4)), sampling=sampling
        )
        made.append(msgspec.structs.replace(request, tenant=str(seed % 40)))
    return made


@pytest.mark.parametrize("seeds", [70, pytest.param(200, marks=pytest.mark.rare)])
@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_no_token_changes(variant: str, seeds: int, tmp_path: Path) -> None:
    machine = Machine(write_tiny_checkpoint(variant, tmp_path / variant))
    wave = asked(tiny_vocab(variant), seeds)
    expected, scores = machine.run([wave], seqs=32), machine.logprobs
    guessed = [
        msgspec.structs.replace(
            each, prediction_ids=tuple(1 if i % 9 == 8 else token for i, token in enumerate(expected[each.request_id]))
        )
        for each in wave
    ]
    methods: tuple[Literal["ngram", "suffix"], ...] = ("ngram", "suffix")
    for method in methods:
        for requests in (wave, guessed):
            for how in ({}, {"blocks": 40, "budget": 64}):
                assert machine.run([requests], seqs=16, speculation=method, **how) == expected
                assert machine.logprobs == scores
                assert machine.accepted > (100 if requests is guessed else 0)
                assert machine.preemptions > 0 or not how


def test_no_token_of_a_real_model_changes() -> None:
    """A line of text that is repeated, which a real model goes on with; the last ones are sampled."""
    machine = Machine(smollm2(), dtype="bfloat16")
    source = random.Random(3)
    wave = []
    for seed in range(12):
        line = [source.randrange(1000, 20000) for _ in range(12)]
        sampling = SamplingParams(seed=seed, max_tokens=60, temperature=0.0 if seed < 8 else 0.7, logprobs=1)
        prompt = (*line, 198) * 4
        wave.append(GenerateRequest(request_id=str(seed), prompt_ids=prompt, sampling=sampling))
    expected, scores = machine.run([wave], seqs=6), machine.logprobs
    got = machine.run([wave], seqs=6, speculation="suffix")
    assert got == expected and machine.logprobs == scores
    assert machine.accepted > 50
