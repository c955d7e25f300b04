"""The times of requests on the receiver's clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.link.commands import WINDOW, CommandReader
from penstock.engine.link.wire import Abort, Add, Rejected, encode
from penstock.messages import GenerateRequest
from tests.engine.link.test_wire import REQUEST
from tests.schedule.simulated import request

HOURS = 3600.0


class Ends:
    """The two ends of a link. The receiver's clock is `ahead` of the sender's."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead
        self.sent = 1000.0  # on the sender's clock
        self.on_the_way = 0.0
        self._reader = CommandReader(lambda: self.sent + self.on_the_way + self.ahead)

    def send(self, on_the_way: float, **times: float) -> GenerateRequest:
        self.on_the_way = on_the_way
        command = self._reader.read(encode(Add(request("r", 3, 3, **times), self.sent)))
        assert isinstance(command, Add)
        return command.request


@given(
    st.floats(-9 * HOURS, 9 * HOURS),
    st.lists(st.tuples(st.floats(0.0, 20.0), st.floats(0.0, 5.0)), min_size=1, max_size=40),
)
def test_a_time_is_late_by_the_shortest_way_of_late(ahead: float, sends: list[tuple[float, float]]) -> None:
    ends, ways = Ends(ahead), [(0.0, 1e9)]
    for pause, least in sends:
        ends.sent += pause
        way = max(least, ways[-1][0] - ends.sent)  # nothing overtakes
        ways.append((ends.sent + way, way))
        got = ends.send(way, arrival=ends.sent - 1.0, deadline=ends.sent + 9.0, first_token_deadline=ends.sent + 4.0)
        late = got.arrival - (ends.sent - 1.0 + ahead)
        newest = ways[-1][0]
        assert min(way for _, way in ways) - 1e-6 <= late
        assert late <= min(way for received, way in ways if received > newest - WINDOW) + 1e-6
        assert got.deadline == pytest.approx(got.arrival + 10.0)
        assert got.first_token_deadline == pytest.approx(got.arrival + 5.0)


def test_a_clock_that_was_stopped_is_measured_anew() -> None:
    """Such as the clock of a machine that was suspended."""
    ends = Ends(ahead=5 * HOURS)
    assert ends.send(0.0, arrival=ends.sent).arrival == ends.sent + 5 * HOURS
    ends.ahead += HOURS
    for _ in range(30):
        ends.sent += WINDOW / 10
        last = ends.send(0.25, arrival=ends.sent).arrival
    assert last == ends.sent + 6 * HOURS + 0.25


def test_what_is_not_given_stays_out() -> None:
    got = Ends(ahead=HOURS).send(0.0)
    assert (got.arrival, got.deadline, got.first_token_deadline) == (0.0, None, None)


def test_other_commands_and_requests_of_wrong_types_pass() -> None:
    reader = CommandReader(lambda: 0.0)
    assert reader.read(encode(Abort("r"))) == Abort("r")
    wrong = reader.read(encode(Add(REQUEST, "now")))  # type: ignore[arg-type]
    assert isinstance(wrong, Rejected) and wrong.request_id == "r"
