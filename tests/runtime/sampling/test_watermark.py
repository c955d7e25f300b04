"""Watermarks: the native kernels choose the reference's tokens, however requests are served, and texts show the key."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.messages import GenerateRequest
from penstock.runtime.sampling.watermark import CONTEXT, GREEN_SHARE, Scheme, Watermark, detect
from tests.invariance.test_batch_invariance import requests
from tests.models.serving import Server, make_device_runner, make_runner
from tests.runtime.byte_tokens import END, OTHER_END
from tests.runtime.sampling.test_grammars import GRAMMARS, holding
from tests.runtime.test_device_runner import Answer, answers, assert_same

Checkpoint = Callable[..., Path]
SECRET = "the secret of these tests"
SCHEMES: tuple[Scheme, ...] = ("green-list", "gumbel")


def wave(count: int = 12) -> list[GenerateRequest]:
    """Greedy and drawn in every way, with penalties, logprobs, grammars and several choices."""
    made = []
    for i, each in enumerate(requests("qwen3")[:count]):
        sampling = replace(
            each.sampling,
            max_tokens=40,
            logprobs=2 if i % 4 == 1 else None,
            logit_bias={7: 1.0} if i % 3 else {},
            eos_token_ids=(END, OTHER_END),
            ignore_eos=i % 5 != 4,
        )
        grammar = GRAMMARS[0] if i % 5 == 4 else None
        made.append(replace(each, sampling=sampling, grammar=grammar, n=3 if i % 7 == 3 else 1))
    return made


def run(runner: Any, asked: list[GenerateRequest], **how: Any) -> dict[tuple[str, int], Answer]:
    return answers(Server(holding(runner), **how).run(asked))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_do_not_depend_on_how_they_are_served(scheme: Scheme, tiny_checkpoint: Checkpoint) -> None:
    """On the native kernels and the reference, two plans ahead, in chunks, preempted, and resumed at any token."""
    folder, asked, marked = tiny_checkpoint("qwen3"), wave(), {"watermark": scheme, "watermark_key": SECRET}
    deltas = Server(holding(make_runner(folder, **marked))).run(asked)
    expected = answers(deltas)
    plain = run(make_runner(folder), asked)
    assert expected != plain
    ways: tuple[tuple[Any, dict[str, int]], ...] = (
        (make_runner, {"blocks": 14, "budget": 24}),
        (make_device_runner, {"max_num_seqs": 5}),
    )
    for make, how in ways:
        assert_same(Server(holding(make(folder, **marked)), **how).run(asked), deltas)
    assert_same(Server(holding(make_runner(folder, recorded=False, **marked))).run(asked), deltas)
    for request in asked[:2]:
        tokens = expected[request.request_id, 0].tokens
        first = replace(request, n=1, sampling=replace(request.sampling, logprobs=None))
        parts = [replace(first, request_id=str(i), output_ids=tokens[:i]) for i in range(1, len(tokens), 3)]
        given = run(make_runner(folder, **marked), parts)
        assert all(part.output_ids + given[part.request_id, 0].tokens == tokens for part in parts)
    if scheme == "gumbel":  # greedy outputs have no noise
        assert all(
            expected[each.request_id, 0] == plain[each.request_id, 0] for each in asked if not each.sampling.temperature
        )


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_mark_is_in_the_tokens(scheme: Scheme, tiny_checkpoint: Checkpoint) -> None:
    asked = [replace(each, sampling=replace(each.sampling, max_tokens=120)) for each in requests("qwen3")[1:20:8]]
    given = run(make_runner(tiny_checkpoint("qwen3"), watermark=scheme, watermark_key=SECRET), asked)
    mark, other = Watermark.of(scheme, SECRET), Watermark.of(scheme, SECRET + ".")
    for answer in given.values():
        assert detect(mark, answer.tokens).p < 1e-4
        assert detect(other, answer.tokens).p > 1e-3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_p_is_the_probability_under_chance(scheme: Scheme) -> None:
    """Texts that repeat themselves are no evidence. P-values of random texts are spread evenly, or above."""
    source = random.Random(3)
    values = []
    for i in range(600):
        phrases = [[source.randrange(50) for _ in range(9)] for _ in range(6)]
        text = [token for _ in range(30) for token in source.choice(phrases)]
        values.append(detect(Watermark.of(scheme, f"key {i}"), text).p)
    for limit in (0.5, 0.1, 0.02):
        share = sum(value <= limit for value in values) / len(values)
        assert share < limit + 4 * math.sqrt(limit * (1 - limit) / len(values)), (limit, share)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_tails_are_exact(scheme: Scheme) -> None:
    """Compared with sums in integers, or with the integral."""
    mark, source = Watermark.of(scheme, SECRET), random.Random(1)
    for count in (1, 2, 5, 40, 300):
        text = source.sample(range(2000), count + CONTEXT[scheme])
        found = detect(mark, text)
        assert found.tokens == count
        if scheme == "green-list":
            wins = range(int(found.score), count + 1)
            exact = sum(math.comb(count, k) * 3 ** (count - k) for k in wins) / 4**count
            assert GREEN_SHARE == 1 / 4
        else:
            x = found.score + np.linspace(0, 60 + 20 * math.sqrt(count), 400_001)
            exact = float(np.trapezoid(np.exp((count - 1) * np.log(x) - x - math.lgamma(count)), x))
        assert found.p == pytest.approx(exact, rel=1e-5)


def test_a_repeated_context_has_ordinary_noise() -> None:
    """So an output that would repeat itself for ever is free to go on."""
    mark = Watermark.of("gumbel", SECRET)
    assert mark.key_after(np.array([1, 2, 3], np.int32)) is None
    assert mark.key_after(np.array([1, 2, 3, 4], np.int32)) is not None
    assert mark.key_after(np.array([1, 2, 3, 4, 9, 1, 2, 3, 4], np.int32)) is None
    assert mark.key_after(np.array([5, 5, 5, 5, 5], np.int32)) is None
    same = mark.key_after(np.array([8, 1, 2, 3, 4], np.int32)), mark.key_after(np.array([1, 2, 3, 4], np.int32))
    assert same[0] == same[1]
