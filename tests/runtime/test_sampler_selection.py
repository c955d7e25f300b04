"""Finding the best few: against a full sort, with equal logits, zeros of both signs and infinities."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.selection import NO_TOKEN, best_first, count, gather, top_floor


@pytest.mark.parametrize("vocab", [1, 7, 600, 5000])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 1.0])
def test_best_first_is_a_stable_sort(vocab: int, share: float) -> None:
    k = max(1, int(vocab * share))
    random = np.random.default_rng(vocab)
    for scale in (1.0, 0.0, 5.0):
        logits = np.round(random.standard_normal((5, vocab)) * scale * 4).astype(np.float32) / 4
        found = best_first(logits, k)
        expected = np.argsort(-logits, axis=1, kind="stable")[:, :k]
        assert np.array_equal(found.token_ids[:, :k], expected)
        assert np.array_equal(found.values[:, :k], np.take_along_axis(logits, expected, axis=1))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.0, 1.5, -1.5, 1e-40, -1e-40, 3e38, -3e38, -np.inf]), min_size=1, max_size=40))
def test_every_kind_of_float_is_ordered(values: list[float]) -> None:
    logits = np.array([values], np.float32)
    found = best_first(logits, len(values))
    expected = sorted(range(len(values)), key=lambda token: (-logits[0, token], token))
    assert found.token_ids[0].tolist() == expected


def test_a_floor_leaves_at_least_k_and_not_many_more() -> None:
    logits = np.random.default_rng(1).standard_normal((3, 100000)).astype(np.float32)
    for k in (1, 20, 1000, 40000):
        left = count(logits >= top_floor(logits, k)[:, None])
        assert (left >= k).all() and (left <= 1.5 * k + 20).all()


def test_gather_pads_shorter_rows() -> None:
    values = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    marks = np.array([[True, False, True], [False, True, False]])
    found = gather(values, marks)
    assert found.values.tolist() == [[1, 3], [5, -np.inf]]
    assert found.token_ids.tolist() == [[0, 2], [1, NO_TOKEN]]
    ids = np.array([[10, 11, 12], [20, 21, 22]], np.uint32)
    assert gather(values, marks, ids).token_ids.tolist() == [[10, 12], [21, NO_TOKEN]]
    assert gather(values[1:], marks[1:], ids[1:]).token_ids.tolist() == [[21]]
