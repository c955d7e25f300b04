"""Merging steps that wait for a slow reader."""

from penstock.engine.link.merge import StepBuffer
from penstock.engine.link.wire import ControlReply, Rejected, Step
from penstock.messages import Completed, EngineStats, TokenDelta


def test_the_rest_of_a_step_waits_too() -> None:
    buffer = StepBuffer()
    assert not buffer
    buffer.push(Step(EngineStats(steps=1), [TokenDelta("a", 0, 0, (1,))], [Rejected("x", "no")], ["y"]))
    buffer.push(Step(EngineStats(steps=2), [TokenDelta("a", 0, 1, (2,))], [], ["z"], [ControlReply(1, Completed())]))
    assert buffer
    step = buffer.take()
    assert not buffer
    assert step == Step(
        EngineStats(steps=2),
        [TokenDelta("a", 0, 0, (1, 2))],
        [Rejected("x", "no")],
        ["y", "z"],
        [ControlReply(1, Completed())],
    )
