"""The host side of the sampler: what it plans for a step and which tables it keeps. Other tests compare its tokens."""

import numpy as np
import pytest
import torch

from penstock.messages import SamplingParams
from penstock.runtime.sampling.sampler import Sampler
from penstock.runtime.step_kernels import ReferenceStep


def make() -> Sampler:
    return Sampler(50, 4, torch.device("cpu"), shared=False)


def edited(sampler: Sampler, rows: list[int], outputs: list[int]) -> list[int]:
    return sampler.plan(np.array(rows), np.array(outputs)).edited.tolist()


def test_a_ban_is_applied_as_long_as_it_lasts() -> None:
    sampler = make()
    sampler.add(1, SamplingParams(seed=0, max_tokens=9, min_tokens=3, stop_token_ids=(5,)), 0, [1, 2], [])
    sampler.add(2, SamplingParams(seed=0, max_tokens=9, repetition_penalty=1.1), 0, [1, 2], [])
    sampler.add(3, SamplingParams(seed=0, max_tokens=9, min_tokens=3), 0, [1, 2], [])  # of no stop
    assert edited(sampler, [3, 2, 1], [0, 0, 0]) == [1, 2]
    assert edited(sampler, [1, 2], [2, 2]) == [0, 1]
    assert edited(sampler, [1, 2], [3, 3]) == [1]
    sampler.remove(2)
    assert edited(sampler, [1, 2, 3], [0, 0, 0]) == []


def test_a_step_is_planned_again_only_while_a_ban_may_end() -> None:
    sampler = make()
    sampler.add(1, SamplingParams(seed=0, max_tokens=9, min_tokens=3, stop_token_ids=(5,)), 0, [1, 2], [])
    sampler.add(2, SamplingParams(seed=0, max_tokens=9, repetition_penalty=1.1), 0, [1, 2], [])
    plans = [sampler.plan(np.array(rows), np.array(outputs)) for rows, outputs in (([1, 2], [0, 0]), ([1, 2], [3, 3]))]
    assert [(plan.edited.tolist(), plan.settled) for plan in plans] == [([0, 1], False), ([1], True)]


def test_what_a_step_asks_of_sampling() -> None:
    sampler = make()
    sampler.add(0, SamplingParams(seed=0, max_tokens=9, temperature=0.0, top_p=0.5), 0, [1], [])
    sampler.add(1, SamplingParams(seed=0, max_tokens=9, top_p=0.5, logprobs=3), 0, [1], [])
    alone, both = (sampler.plan(np.array(rows), np.zeros(len(rows), np.int64)) for rows in ([0], [0, 1]))
    assert (alone.filtered, alone.most_logprobs) == (False, -1)
    assert (both.filtered, both.most_logprobs, both.logprobs.tolist()) == (True, 3, [-1, 3])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias names token ids from 50 to 50; the logits are of ids 0 to 49"),
        ({"presence_penalty": 1.0}, "the prompt names token ids from 7 to 60"),
        ({"logprobs": 51}, "51 logprobs of a vocabulary of 50: ask for 50 at most"),
    ],
)
def test_what_the_vocabulary_does_not_allow_is_refused(asked: dict[str, object], message: str) -> None:
    sampler = make()
    with pytest.raises(ValueError, match=message):
        sampler.add(0, SamplingParams(seed=0, max_tokens=1, **asked), 0, [7, 60], [])  # type: ignore[arg-type]
    assert edited(sampler, [0], [0]) == []
    (change,) = sampler.changes()
    assert change.arrays[0].tolist() == [0]  # the row is greedy and scores nothing, whatever it was before
    plain = sampler.plan(np.array([0]), np.array([0]))
    assert (plain.filtered, plain.most_logprobs, len(plain.edited)) == (False, -1, 0)


def send(sampler: Sampler) -> None:
    for change in sampler.changes():
        change.write([torch.from_numpy(np.ascontiguousarray(array)) for array in change.arrays])


def test_tables_of_edits_widen_and_keep_what_they_hold() -> None:
    sampler = make()

    def biased(row: int, tokens: range) -> None:
        bias = {token: 100.0 + token for token in tokens}
        sampler.add(row, SamplingParams(seed=0, max_tokens=9, temperature=0.0, logit_bias=bias), 0, [1], [])
        send(sampler)

    biased(0, range(2))
    biased(2, range(10, 31))
    logits = torch.zeros(2, 50)
    lines = torch.tensor([[0, 2], [0, 1], [0, 0]], dtype=torch.int32)
    both = torch.tensor([0, 1], dtype=torch.int32)
    tokens = torch.zeros(4, 32, dtype=torch.int32)
    chosen = ReferenceStep().choose(
        logits, lines, sampler.rows, sampler.edits, tokens, edited=both, filtered=False, logprobs=-1
    )
    assert chosen.tokens.tolist() == [1, 30]
    assert logits[0].nonzero().flatten().tolist() == [0, 1]
    assert logits[1, 10:31].tolist() == [100.0 + token for token in range(10, 31)] and logits[1].count_nonzero() == 21


def test_a_table_that_widens_leaves_the_other_as_wide_as_it_is() -> None:
    biases = {token: 1.0 + token for token in range(20)}
    bans = tuple(range(30, 41))
    sampler = make()
    sampler.add(0, SamplingParams(seed=0, max_tokens=9, logit_bias=biases), 0, [1], [])
    send(sampler)
    sampler.add(1, SamplingParams(seed=0, max_tokens=9, min_tokens=3, stop_token_ids=bans), 0, [1], [])
    send(sampler)
    sampler.add(2, SamplingParams(seed=0, max_tokens=9, logit_bias=dict.fromkeys(range(40), 2.0)), 0, [1], [])
    send(sampler)
    edits = sampler.edits
    assert edits.bias_count.tolist()[:3] == [20, 0, 40] and edits.ban_count.tolist()[:3] == [0, 11, 0]
    assert edits.bias_ids[0, :20].tolist() == list(biases) and edits.biases[0, :20].tolist() == list(biases.values())
    assert sorted(edits.ban_ids[1, :11].tolist()) == list(bans)
    assert edits.bias_ids[2, :40].tolist() == list(range(40))


def test_after_a_failure_a_row_has_no_edits_of_the_one_before() -> None:
    """The step that was to overwrite them may not have run."""
    sampler = make()
    sampler.add(0, SamplingParams(seed=0, max_tokens=9, logit_bias={5: 1.0}, repetition_penalty=2.0), 0, [1], [])
    send(sampler)
    sampler.add(0, SamplingParams(seed=0, max_tokens=9), 0, [1], [])
    assert sampler.changes()  # which are lost
    sampler.clear()
    assert edited(sampler, [0], [0]) == []
    sampler.add(0, SamplingParams(seed=0, max_tokens=9), 0, [1], [])
    send(sampler)
    assert sampler.edits.bias_count[0] == 0 and sampler.edits.repetition[0] == 1
