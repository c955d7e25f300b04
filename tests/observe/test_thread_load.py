"""How busy a thread is, as the kernel counts."""

import time

import pytest

from penstock.observe.thread_load import LOOK_SECONDS, ThreadLoad


def test_a_thread_that_computes_is_busy_and_one_that_sleeps_is_not() -> None:
    load = ThreadLoad()
    if load._file < 0:
        pytest.skip("the kernel does not count the time that threads wait for a processor")
    began = time.monotonic()
    assert load.busy(began) == 0.0  # nothing is known yet
    while (now := time.monotonic()) < began + 2 * LOOK_SECONDS:
        pass
    assert load.busy(now) > 0.8
    assert load.busy(now + LOOK_SECONDS / 2) > 0.8  # the last reading
    time.sleep(2 * LOOK_SECONDS)
    assert load.busy(time.monotonic()) < 0.5
    load.close()
    load.close()
