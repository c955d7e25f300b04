"""The budget of bytes that bodies share."""

import pytest

from penstock.frontend import RequestLimits
from penstock.frontend.errors import APIError
from penstock.frontend.http.buffers import body_budget

MOST = 1 << 20


def test_stored_bytes_pass_the_budget_while_no_other_body_is_held() -> None:
    """A stored conversation that is larger than the budget could never be read else."""
    budget = body_budget(RequestLimits(max_buffered_bytes=MOST, max_body_bytes=MOST))
    alone = budget.hold()
    alone.add(1000)
    alone.add_stored(MOST)
    alone.add_stored(MOST)
    assert budget.used == 1000 + 2 * MOST
    other = budget.hold()
    with pytest.raises(APIError, match=f"holds {budget.used} bytes.*limit is {MOST} in total"):
        other.add(1)
    with pytest.raises(APIError):
        other.add_stored(1)
    alone.release()
    assert budget.used == 0
    other.add(1)
    with pytest.raises(APIError):
        alone.add_stored(MOST)
    other.release()
    with pytest.raises(APIError):  # only stored bytes may pass it
        alone.add(MOST + 1)
    assert budget.used == 0
