"""What a rank's process keeps for others, and what it is told by its sockets."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import pytest
import zmq

from penstock.config import EngineConfig
from penstock.engine.ranks.rank_socket import RankSocket
from penstock.engine.ranks.wire import Done, Execute, Loaded, Report, Start, encode
from penstock.engine.ranks.worker import DEVICE, MESH, Pulse, hold_port, obey, place_in_code
from penstock.messages import Capacity, KVGroup, StepPlan, StepResult
from tests.patience import AT_ONCE


def test_a_port_that_is_held_is_given_to_nobody_but_who_asks_for_it() -> None:
    with hold_port() as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for address in ("127.0.0.1", ""):
            with socket.create_server((address, port)) as listening:
                socket.create_connection(("127.0.0.1", port)).close()
                assert listening.getsockname()[1] == port


def test_the_end_of_a_process_is_news_once(tmp_path: Path) -> None:
    """It stays readable: who waits for last words would else spin."""
    ranks = RankSocket(1, f"ipc://{tmp_path}/s")
    process = subprocess.Popen([sys.executable, "-S", "-c", "pass"])
    descriptor = os.pidfd_open(process.pid)
    try:
        ranks.watch(descriptor)
        began = time.monotonic()
        assert ranks.receive(30) == []
        assert time.monotonic() - began < AT_ONCE
        spent = time.process_time()
        began = time.monotonic()
        assert ranks.receive(0.2) == []
        assert time.monotonic() - began >= 0.2
        assert time.process_time() - spent < 0.1
    finally:
        process.wait()
        os.close(descriptor)
        ranks.close()


class Computing:
    """A runner on a device that has done a plan when it was asked `patient` times."""

    max_outstanding = 2
    capacity = Capacity(4, (KVGroup(5),), 2)

    def __init__(self, pulse: Pulse, patient: int) -> None:
        self.pulse = pulse
        self.patient = patient
        self.calls: list[str] = []
        self.plans: list[int] = []

    def learn(self, result: StepResult) -> None:
        self.calls.append(f"learn {result.plan_id}")

    def submit(self, plan: StepPlan) -> None:
        self.calls.append(f"submit {plan.plan_id}")
        self.plans.append(plan.plan_id)

    @property
    def ready(self) -> bool:
        assert self.pulse.waits
        self.patient -= 1
        return self.patient < 0

    def take(self) -> StepResult | None:
        assert not self.pulse.waits and self.pulse.doing == f"plan {self.plans[0]}"
        self.calls.append(f"take {self.plans[0]}")
        return StepResult(self.plans.pop(0), ())


@pytest.mark.parametrize(
    ("orders", "calls"),
    [
        (3, ["submit 1", "submit 2", "take 1", "submit 3", "take 2"]),  # each is launched while one computes
        (1, ["submit 1", "take 1"]),  # none comes: the result is asked for when it is there
    ],
)
def test_an_order_is_taken_in_while_a_device_computes(orders: int, calls: list[str]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://orders")
    theirs.connect("inproc://orders")
    pulse = Pulse(ours, 0, MESH)
    runner, told = Computing(pulse, patient=0 if orders == 1 else 10**9), list[Report]()

    def tell(report: Report) -> None:
        told.append(report)
        if orders == 1 and isinstance(report, Done):
            ours.send(encode(start))

    start = Start(EngineConfig(model="", name=""), 0, "", (), (0, 1))
    for number in range(orders):
        ours.send(encode(Execute(StepPlan(number + 1, ()), (StepResult(number, ()),))))
    if orders > 1:
        ours.send(encode(start))
    try:
        with pytest.raises(RuntimeError, match="an order was Start, not Execute"):
            obey(start, theirs, pulse, lambda start: runner, tell)
    finally:
        context.destroy(linger=0)
    assert runner.calls == calls  # this rank reports, so it has nothing to learn
    assert isinstance(told[0], Loaded) and pulse.plans == len(told) - 1 == sum("take" in call for call in calls)


def test_who_waits_for_a_device_may_wait_for_other_ranks() -> None:
    def frame(*modules: str) -> FrameType:
        """Of a function of the last module, called by one of each before."""
        call: object = sys._getframe
        for module in reversed(modules):
            names = {"__name__": module, "call": call}
            exec("def function(): return call()", names)
            call = names["function"]
        return call()  # type: ignore[no-any-return, operator]

    device = place_in_code(frame("penstock.runtime.device_runner", DEVICE, "threading"), MESH)
    assert device == ("runtime.device:1 in function", True)
    # What stands in for a device computes there.
    assert place_in_code(frame(DEVICE, "penstock.models.decoder"), MESH) == ("models.decoder:1 in function", False)
    assert place_in_code(frame(MESH, "penstock.runtime.mesh.process_groups"), MESH)[1]
