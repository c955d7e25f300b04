"""AWQ: moves part of the spread of a product's inputs into its weight, where rounding costs less.

Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023.
"""

from collections.abc import Sequence

from torch import Tensor

from penstock.quantize.formats.grid import CodeFormat
from penstock.quantize.moments import Moments
from penstock.quantize.rounding import rounded
from penstock.quantize.workers import Workers

EXPONENTS = tuple(i / 10 for i in range(11))


def awq_scales(weights: Sequence[tuple[Tensor, CodeFormat]], moments: Moments, workers: Workers) -> Tensor | None:
    """Returns the factors [columns] by which the weights' columns are multiplied and their inputs divided, or None
    where none lessens the error of the outputs. `weights` are the parts [rows, columns] of the products that read these
    inputs, each with its format.

    The factors are the inputs' root mean square to an exponent; the exponent with the least error for windows held out
    is taken.
    """
    if not moments.tokens:
        return None
    spread = moments.importance.sqrt().clamp_min(1e-6)

    def tried(exponent: float) -> tuple[float, Tensor | None]:
        scales = spread**exponent
        scales = (scales / (scales.amax() * scales.amin()).sqrt()).clamp(1e-4, 1e4)
        error = 0.0
        for matrix, fmt in weights:
            weight = rounded(matrix * scales, fmt, moments.importance / scales.square(), search=False)
            error += moments.error(matrix - weight.values / scales)
        return error, scales if exponent else None

    return min(workers.map(tried, EXPONENTS), key=lambda result: result[0])[1]
