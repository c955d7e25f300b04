"""Rows of codes that a checkpoint's reader has unpacked: in the form that the native packer takes, and as fp32."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.config.weights import FRACTIONS, TABLES, WeightFormat

CODED = "CODED"  # the type of rows with a byte for each code, then fp32 scales and minima of the groups


@dataclass(frozen=True)
class CodedRows:
    """Rows of a weight as codes of a format."""

    codes: NDArray[np.uint8]  # [rows, k], one a byte
    scales: NDArray[np.float32]  # [rows, groups]
    mins: NDArray[np.float32] | None  # [rows, groups]
    format: WeightFormat
    order: NDArray[np.int32] | None = None  # [k]: the column of the matrix that each is, if the format is ordered

    def packed_as(self, target: WeightFormat) -> NDArray[np.uint8]:
        """The rows [rows, bytes] of the type CODED in a format that holds them without loss (see format_of), but for
        the values of a table that are rounded to integers (see FRACTIONS)."""
        own, codes = self.format, self.codes
        if (own.codes, own.zero) != (target.codes, target.zero):
            table = TABLES.get(own.codes)
            values = np.arange(256) - own.zero if table is None else np.resize(table, 256)
            codes = (values + target.zero).astype(np.uint8).take(codes)
        _, unit = FRACTIONS.get(own.codes, ((), 1.0))
        factors = [self.scales * np.float32(unit)]
        if target.mins:
            factors.append(np.zeros_like(self.scales) if self.mins is None else self.mins)
        groups = target.groups(codes.shape[1])
        parts = (_repeated(each, own.group // target.group, groups).view(np.uint8) for each in factors)
        return np.concatenate((codes, *parts), 1)

    def values(self) -> NDArray[np.float32]:
        """The values [rows, k], in the order of the matrix's columns."""
        table, _ = FRACTIONS.get(self.format.codes, (TABLES.get(self.format.codes), 1.0))
        k = self.codes.shape[1]
        if table is None:
            values = self.codes - np.float32(self.format.zero)
        else:
            values = np.array(table, np.float32).take(self.codes)
        values *= np.repeat(self.scales, self.format.group, 1)[:, :k]
        if self.mins is not None:
            values += np.repeat(self.mins, self.format.group, 1)[:, :k]
        return values if self.order is None else values.take(np.argsort(self.order), 1)


def _repeated(factors: NDArray[np.float32], times: int, groups: int) -> NDArray[np.float32]:
    """Factors [rows, groups] of finer groups, each that of the group around it. Groups of padding get 0."""
    finer = np.repeat(factors, times, 1)[:, :groups]
    return np.ascontiguousarray(np.pad(finer, ((0, 0), (0, groups - finer.shape[1]))), np.float32)


def same_order(before: NDArray[np.int32] | None, order: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the order of a weight's columns. Raises ValueError if rows before had another one."""
    if before is not None and not np.array_equal(before, order):
        raise ValueError(
            "its columns are in another order (act-order) than those of a matrix that reads the same input"
        )
    return order
