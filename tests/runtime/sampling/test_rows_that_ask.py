"""A row with logprobs or edits does not change how the others' steps run: recorded, and without planning again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.session import Program
from penstock.messages import GenerateRequest, SamplingParams
from penstock.runtime.programs.recorded import RecordedStep
from penstock.runtime.runner import ModelRunner
from tests.models.serving import Server, make_runner, outputs

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")


def requests(**more: object) -> list[GenerateRequest]:
    """Requests that all begin at once and end one after another; one of them has the extra option."""
    return [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=tuple(range(7, 9 + 5 * i)),
            sampling=SamplingParams(
                seed=i, max_tokens=4 + 3 * i, temperature=0.5 * (i % 3), ignore_eos=True, **(more if i == 2 else {})
            ),
        )
        for i in range(6)
    ]


class Counted:
    """Counts the plans that a runner makes and the programs it runs."""

    def __init__(self, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner, self.described, self.programs = runner, 0, 0
        describe, run = runner._eager.describe, RecordedStep._run

        def counted_describe(*arguments: Any) -> Any:
            self.described += 1
            return describe(*arguments)

        def counted_run(step: RecordedStep, program: Program) -> None:
            self.programs += step is runner._step
            run(step, program)

        monkeypatch.setattr(runner._eager, "describe", counted_describe)
        monkeypatch.setattr(RecordedStep, "_run", counted_run)


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 2},
        {"presence_penalty": 1.0},
        {"logit_bias": {5: 2.0}, "repetition_penalty": 1.2, "logprobs": 1},
        {"min_tokens": 3, "stop_token_ids": (1, 2)},
    ],
    ids=str,
)
def test_one_row_that_asks_for_more_costs_the_others_nothing(
    variant: str, more: dict[str, object], tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []
    for asked in ({}, more):
        counted = Counted(make_runner(tiny_checkpoint(variant)), monkeypatch)
        tokens = outputs(Server(counted.runner, budget=256).run(requests(**asked)))
        given.append((tokens, counted.described, counted.programs))
    (plain, described, programs), (mixed, described_mixed, programs_mixed) = given
    assert (described_mixed, programs_mixed) == (described, programs)
    assert {key: each for key, each in mixed.items() if key[0] != "2"} == {
        key: each for key, each in plain.items() if key[0] != "2"
    }
    assert sorted(map(len, mixed.values())) == [4, 7, 10, 13, 16, 19]
