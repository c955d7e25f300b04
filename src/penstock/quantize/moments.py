"""Second moments of a product's inputs: what quantisation needs of the calibration."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.quantize.workers import Workers

HELD_OUT = 8  # one window in so many measures what was chosen by the others
BLOCK = 128  # columns whose sums a worker adds to
DAMPING = 0.01  # of the mean diagonal, which is added to it


@dataclass
class Moments:
    """The sums of x x^T over the tokens that a product read, [columns, columns]. The error of its outputs follows from
    them: sum |W x - V x|^2 = tr((W - V) M (W - V)^T)."""

    columns: int
    split: bool = False  # whether windows are held out; without, all of them are in both
    fit: Tensor = field(init=False)  # of most windows: codes are chosen by it
    check: Tensor = field(init=False)  # of the windows that were held out
    drift: Tensor | None = None  # sum of (o - x) x^T, where the original's product reads o in place of x
    tokens: int = 0

    def __post_init__(self) -> None:
        self.fit = torch.zeros(self.columns, self.columns)
        self.check = torch.zeros_like(self.fit) if self.split else self.fit

    def add(self, x: Tensor, original: Tensor | None = None, *, held_out: bool, workers: Workers) -> None:
        """Adds the fp32 rows of x [tokens, columns], in whose place the original's product reads `original`."""
        aside = held_out and self.split
        total = self.check if aside else self.fit
        difference = None if aside or original is None else original - x
        self.tokens += 0 if aside else len(x)
        if difference is not None and self.drift is None:
            self.drift = torch.zeros_like(self.fit)

        def add_to(begin: int) -> None:
            """Adds to the rows of some columns. The sums of x x^T are symmetric: one half is copied."""
            end = begin + BLOCK
            total[begin:end, begin:].addmm_(x[:, begin:end].T, x[:, begin:])
            total[end:, begin:end] = total[begin:end, end:].T
            if difference is not None and self.drift is not None:
                self.drift[begin:end].addmm_(difference[:, begin:end].T, x)

        for _ in workers.map(add_to, range(0, self.columns, BLOCK)):
            pass

    def corrected(self, weights: Tensor) -> Tensor:
        """Returns the weights [rows, columns] that come nearest to the original's outputs, W o, from x: by least
        squares they are W + W drift (sum of x x^T)^-1 (Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for
        Asymmetric Calibration", 2025)."""
        if self.drift is None:
            return weights
        factor = self.factor()
        change: Tensor = torch.linalg.multi_dot((weights, self.drift, factor.T, factor))  # in the cheapest order
        return weights + change

    def scaled(self, factors: Tensor) -> None:
        """Does what dividing each x by `factors` [columns] would have done."""
        outer = factors[:, None] * factors
        self.fit /= outer
        if self.split:
            self.check /= outer

    @property
    def importance(self) -> Tensor:
        """The mean square of each column, by which errors of weights are weighed."""
        return self.fit.diagonal() / max(self.tokens, 1)

    def factor(self, order: Tensor | None = None) -> Tensor:
        """Returns the upper Cholesky factor of the inverse of the damped moments, with columns in this order. Columns
        that were always 0 count as if they were 1."""
        damped = self.fit.clone() if order is None else self.fit[order][:, order]
        diagonal = damped.diagonal()
        dead = diagonal == 0
        level = diagonal.mean().item() or 1.0
        diagonal[dead] = level
        for strength in (DAMPING, 10 * DAMPING, 1.0, 100.0):
            raised = damped.clone()
            raised.diagonal().add_(strength * level)
            lower, status = torch.linalg.cholesky_ex(raised)
            if status == 0:
                upper: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
                return upper
        return torch.eye(self.columns)

    def error(self, difference: Tensor) -> float:
        """Returns sum |D x|^2 of the windows held out, for the difference D of two weights [rows, columns]."""
        return float(((difference @ self.check) * difference).sum(dtype=torch.float64))
