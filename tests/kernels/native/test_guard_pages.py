"""No op touches a byte outside its tensors, before them or behind: each lies between two forbidden pages."""

import signal
import subprocess
from collections.abc import Callable

import pytest

from penstock.kernels.native.loader import instruction_sets
from tests.kernels.native.cases import RIGHT_SIZE
from tests.kernels.native.conftest import SETS, of_instruction_set
from tests.often import often

RunCases = Callable[..., subprocess.CompletedProcess[str]]


SETS_HERE = instruction_sets()
# The best set uses the kernels of the others as well, but for a few.
BEST, OTHERS = list(SETS_HERE[:1]), list(SETS_HERE[1:])


@pytest.mark.long
@pytest.mark.parametrize("sets", often([BEST, *([OTHERS] if OTHERS else [])], [BEST]), ids=str)
def test_every_op_stays_within_its_tensors(run_cases: RunCases, sets: list[str]) -> None:
    done = run_cases("guarded", 2, *sets)
    assert done.returncode == 0, f"{done.stdout[-300:]}\n{done.stderr[-3000:]}"
    assert done.stdout.endswith("all right\n")


@pytest.mark.parametrize("isa", often(SETS, (SETS[0], SETS[-1])))
def test_a_read_of_some_lanes_past_a_tensor_ends_the_process(
    run_cases: RunCases, isa: str, request: pytest.FixtureRequest
) -> None:
    """The control of the test above, for each instruction set: the last lane of a masked load is one byte too far."""
    done = run_cases("part", 1, **of_instruction_set(isa, request.config))
    assert done.returncode == -signal.SIGSEGV, done.stderr[-3000:]
    assert done.stdout == f"{RIGHT_SIZE}\n"
