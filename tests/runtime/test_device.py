"""Uploads, jobs and captures of the Device interface, on a MirrorDevice."""

import gc

import numpy as np
import torch

from penstock.runtime.device import StepOutputs, uncollected
from tests.runtime.mirror_device import MirrorDevice


def test_an_upload_is_a_copy_of_arrays_of_any_kind() -> None:
    device = MirrorDevice()
    arrays = [
        np.arange(5, dtype=np.int32),
        np.zeros(0, np.int64),
        np.arange(6, dtype=np.float64).reshape(2, 3).T,
        np.array([[1], [2**40]], np.int64),
        np.full(3, 0.5, np.float32),
    ]
    want = [array.copy() for array in arrays]
    sent = device.upload(arrays)
    for array in arrays:
        array[...] = 7
    for tensor, array in zip(sent, want, strict=True):
        assert tensor.numpy().dtype == array.dtype
        np.testing.assert_array_equal(tensor.numpy(), array)
    assert device.sent == sum(-(-array.nbytes // 16) * 16 for array in want)


def test_jobs_are_done_in_order_when_one_is_waited_for() -> None:
    device = MirrorDevice()
    state = torch.zeros(1)

    def job(factor: float) -> StepOutputs:
        """`tokens` is a tensor of the job's own, `status` one that the next job overwrites."""
        state.mul_(factor).add_(1.0)
        return StepOutputs(tokens=state.clone(), status=state)

    first, second = device.launch(lambda: job(2.0)), device.launch(lambda: job(10.0))
    assert state.item() == 0.0 and first.ready()
    assert first.wait() == StepOutputs([1.0], [11.0])  # copied after the second wrote where it lies
    assert second.wait() == StepOutputs([11.0], [11.0])
    assert state.item() == 11.0


def test_what_is_captured_works_on_the_same_memory_again() -> None:
    device = MirrorDevice()
    source, target = torch.tensor([3.0]), torch.zeros(1)
    replay = device.capture(lambda: target.copy_(source * 2) and None)
    source.fill_(5.0)
    replay()
    assert target.item() == 10.0


def test_nothing_is_collected_while_a_stream_is_captured() -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
