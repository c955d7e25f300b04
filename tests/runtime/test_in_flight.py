"""The results of a step that verified drafts."""

import numpy as np
import pytest

from penstock.kernels.batch_arrays import CHOSEN, NOT_FINITE
from penstock.messages import SequenceResult, StepPlan, Work
from penstock.runtime.batch import Occupant
from penstock.runtime.device import StepOutputs
from penstock.runtime.in_flight import STATUS_ERRORS, InFlightStep
from penstock.runtime.planning import StepWork
from penstock.runtime.step import Shape
from penstock.runtime.units import Units


def of_one_unit(drafts: int) -> InFlightStep:
    """A step of one sequence that decodes, with drafts."""
    count, one = 1 + drafts, np.ones(1, np.int64)
    units = Units(0 * one, 9 * one, count * one, np.array([0, count]), drafts * one, count * one)
    unit = Work(7, count, True, tuple(range(drafts)))
    shape = Shape(1, count, 0, count, count, count, True)
    rows = np.zeros(count, np.int64)
    work = StepWork((unit,), [7], [Occupant(7, 0)], units, False, rows, shape, None, (), 0)
    return InFlightStep(StepPlan(1, (unit,)), work, None, None, (), 0.0, 0.0)


@pytest.mark.parametrize("row", range(4))
@pytest.mark.parametrize("gained", [1, 2, 3, 4])
def test_a_row_fails_its_sequence_only_if_its_token_counts(gained: int, row: int) -> None:
    """A row behind a refused draft is of a text that does not exist."""
    status = np.full(4, CHOSEN)
    status[row] = NOT_FINITE
    outputs = StepOutputs(np.array([10, 11, 12, 13]), status, accepted=np.array([gained, 0, 0, 0]))
    errors: dict[int, str] = {}
    (result,) = of_one_unit(3).results(outputs, errors)
    if row < gained:
        assert errors == {7: STATUS_ERRORS[NOT_FINITE]} and result == SequenceResult(7, error=errors[7])
    else:
        assert not errors and result == SequenceResult(7, (10, 11, 12, 13)[:gained])
