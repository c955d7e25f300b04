"""Chooses the codes of a weight: by rounding each value, or by GPTQ, and the better of several by measured error."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from penstock.quantize.formats.grid import CodeFormat, Grid, Quantized, joined_grids
from penstock.quantize.moments import Moments
from penstock.quantize.workers import Workers

Method = Literal["rtn", "mse", "gptq", "gptq-ordered"]
BLOCK = 128  # columns whose errors are collected before the columns behind them are corrected
FITTED = 1 << 17  # weights whose grids are searched together


class ChosenCodes(NamedTuple):
    """What was chosen for a weight."""

    weight: Quantized
    method: str  # of Method; after "awq+" if the columns were scaled
    error: float  # mean squared error of outputs over their mean square, of windows held out; NaN without calibration


def quantize(
    weights: Tensor, fmt: CodeFormat, methods: Sequence[Method], moments: Moments | None, workers: Workers
) -> ChosenCodes:
    """Returns the weight [rows, columns] on the format's grid, by the best of `methods`. Without moments, GPTQ is
    rounding on a searched grid. Raises ValueError for weights that are not finite."""
    if not torch.isfinite(weights).all():
        raise ValueError("it has weights that are not finite")
    if moments is None or not moments.tokens:
        search = any(method != "rtn" for method in methods)
        return ChosenCodes(rounded(weights, fmt, None, search=search), "mse" if search else "rtn", float("nan"))
    scale = moments.error(weights) or 1.0

    def codes_by(method: Method) -> ChosenCodes:
        if method in ("rtn", "mse"):
            weight = rounded(weights, fmt, moments.importance, search=method == "mse")
        else:
            weight = gptq(weights, fmt, moments, ordered=method == "gptq-ordered")
        return ChosenCodes(weight, method, moments.error(weights - weight.values) / scale)

    return min(workers.map(codes_by, methods), key=lambda choice: choice.error)


def rounded(weights: Tensor, fmt: CodeFormat, importance: Tensor | None, *, search: bool) -> Quantized:
    """Returns the weight with each value rounded to the nearest on its grid."""
    grid = _fitted(weights, fmt, importance, search=search)
    return Quantized(grid.codes(weights), grid)


def _fitted(weights: Tensor, fmt: CodeFormat, importance: Tensor | None, *, search: bool) -> Grid:
    """Returns the grid of whole rows. They are searched some at a time, so that they stay in a processor's cache."""
    parts = weights.split(max(1, FITTED // weights.shape[1]))
    return joined_grids([fmt.fit(part, importance, search=search) for part in parts], 0)


def gptq(weights: Tensor, fmt: CodeFormat, moments: Moments, *, ordered: bool) -> Quantized:
    """Returns the weight with codes by GPTQ (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative
    Pre-trained Transformers", 2022): columns are rounded one after the other, and those that follow are changed so
    that they make up for the error.

    The grid of a span is chosen when its first column is reached, for the weights as they are then. With `ordered`,
    columns with large inputs come first, and all grids are chosen before: so the order is not in the file.
    """
    rows, columns = weights.shape
    span = fmt.span or columns
    importance, left = moments.importance, weights.T.contiguous()
    fixed: Grid | None = None
    order = importance.argsort(descending=True, stable=True) if ordered else None
    factor = moments.factor(order)
    if order is not None:
        left = left[order]
    if ordered or span == columns:
        fixed = _fitted(weights, fmt, importance, search=True)
    block = BLOCK if fixed is not None or BLOCK % span == 0 else span
    codes, grids = torch.empty(columns, rows), []
    for begin in range(0, columns, block):
        end = min(begin + block, columns)
        piece, errors = left[begin:end].clone(), torch.empty(end - begin, rows)
        for i in range(end - begin):
            column = begin + i
            if fixed is None and column % span == 0:
                part = piece[i : i + span].T
                grids.append(fmt.fit(part.contiguous(), importance[column : column + span], search=True))
            grid, place = (fixed, column) if fixed is not None else (grids[-1], column % span)
            place = int(order[column]) if order is not None else place
            code = grid.codes(piece[i, :, None], place)
            codes[place if fixed is not None else column] = code[:, 0]
            error = (piece[i] - grid.values(code, place)[:, 0]) / factor[column, column]
            piece[i + 1 :].addr_(factor[column, column + 1 : end], error, alpha=-1)
            errors[i] = error
        left[end:].addmm_(factor[begin:end, end:].T, errors, alpha=-1)
    return Quantized(codes.T.contiguous(), fixed if fixed is not None else joined_grids(grids, 1))
