"""On a machine with a GPU the kernels run there, else through Triton's interpreter."""

from tests.kernels.triton.device import DEVICE

if DEVICE.type == "cpu":
    from tests.kernels.triton.interpreter import repair

    repair()
