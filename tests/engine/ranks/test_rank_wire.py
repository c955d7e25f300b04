"""The words between an engine and its ranks, and what is not one of them."""

import msgspec
import pytest

from penstock.config import EngineConfig
from penstock.engine.ranks.wire import (
    Beat,
    Done,
    Execute,
    Hello,
    Loaded,
    Order,
    RankFailed,
    Report,
    Start,
    decode_order,
    decode_report,
    encode,
)
from penstock.engine.ranks.worker import share_of_processors
from penstock.engine.ranks.workers import tokens_only
from penstock.messages import (
    BlockCopy,
    Capacity,
    Identity,
    KVGroup,
    NewSequence,
    SamplingParams,
    SequenceResult,
    StepPlan,
    StepResult,
    StepTiming,
    Window,
    Work,
)

RESULT = StepResult(3, (SequenceResult(1, (5,), b"\x00", b"\x01"), SequenceResult(2, error="no")), StepTiming(0.5))
PLAN = StepPlan(
    4,
    (Work(1, 2, True),),
    (NewSequence(1, (1, 2), 2, 0, ((3,),), SamplingParams(seed=2**64 - 1, max_tokens=3, logit_bias={5: -1.5}), 0),),
    ((2, ((4,),)),),
    (BlockCopy(0, 1, 2),),
    (7,),
)


@pytest.mark.parametrize(
    "order",
    [
        Start(EngineConfig(model="m", name="n", tensor_parallel_size=2), 1, "127.0.0.1:99", (5, 6), (1, 2)),
        Execute(PLAN, (RESULT,)),
    ],
    ids=lambda order: type(order).__name__,
)
def test_orders_arrive_as_sent(order: Order) -> None:
    assert decode_order(encode(order)) == order


@pytest.mark.parametrize(
    "report",
    [
        Hello(9, 2**40, 99),
        Loaded(Capacity(16, (KVGroup(9, Window(4, chunked=True)),), 2, Identity("root"), 50, late_ids=False)),
        Done(RESULT),
        Beat(1, 7, "plan 8", "runtime.mesh:5 in sum", True),
        RankFailed("plan 8", "because", False, True),
    ],
    ids=lambda report: type(report).__name__,
)
def test_reports_arrive_as_sent(report: Report) -> None:
    assert decode_report(encode(report)) == report


def test_an_order_is_no_report() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_report(encode(Execute(PLAN)))


def test_other_ranks_learn_tokens_and_errors_alone() -> None:
    result = StepResult(3, (*RESULT.results, SequenceResult(5, prompt_logprobs=b"\x01")), StepTiming(0.5))
    assert tokens_only(result) == StepResult(3, (SequenceResult(1, (5,)), SequenceResult(2, error="no")))


@pytest.mark.parametrize(
    ("share", "threads", "expected"),
    [
        ((0, 1), 0, [0, 1, 2, 3, 4]),
        ((0, 2), 0, [0, 1]),
        ((1, 2), 2, [2, 3]),
        ((1, 2), 3, [0, 1, 2, 3, 4]),
        ((3, 8), 0, [0, 1, 2, 3, 4]),
    ],
)
def test_ranks_of_a_machine_share_its_processors(share: tuple[int, int], threads: int, expected: list[int]) -> None:
    assert share_of_processors(range(5), share, threads) == range(5)[expected[0] : expected[-1] + 1]
