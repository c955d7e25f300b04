"""Steps in which every sequence decodes, whoever comes and goes between them: the tokens of the long way."""

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.kernels.native.loader import instruction_sets
from penstock.messages import GenerateRequest, SamplingParams, StepPlan, StepResult
from penstock.runtime.runner import ModelRunner
from tests.models.serving import Server, make_runner, outputs

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")


def tokens(runner: ModelRunner, requests: list[GenerateRequest]) -> dict[tuple[str, int], list[int]]:
    return outputs(Server(runner, budget=256).run(requests))


def requests(**more: object) -> list[GenerateRequest]:
    """That all begin at once, and end one after the other."""
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


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
@pytest.mark.parametrize(
    ("more", "long"),
    [
        ({}, 0),
        ({"logprobs": 2}, 3),  # where others come or go while it is there
        ({"presence_penalty": 1.0}, 10),  # all of its own, and the one after
    ],
    ids=["plain", "logprobs", "edits"],
)
def test_steps_go_the_long_way_where_somebody_wants_more_than_tokens(
    variant: str, more: dict[str, object], long: int, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[StepPlan] = []
    compute = ModelRunner._compute

    def counted(runner: ModelRunner, plan: StepPlan, began: float) -> StepResult | None:
        plans.append(plan)
        return compute(runner, plan, began)

    runner, without = (make_runner(tiny_checkpoint(variant)) for _ in range(2))
    without._decoding = None
    expected = tokens(without, requests(**more))
    monkeypatch.setattr(ModelRunner, "_compute", counted)
    assert tokens(runner, requests(**more)) == expected
    assert sorted(map(len, expected.values())) == [4, 7, 10, 13, 16, 19]
    assert plans[0].new, "the prompts fit into one step"
    assert len(plans) - 1 == long
