"""The arithmetic of integer codes while they are read: unpacking, and the form that the grouped format has (see
WeightFormat).

A value is scale * (code - zero point). The grouped format has one zero for a matrix. Codes that are symmetric around
one zero point are shifted to it; others get a minimum for each group: scale * (zero - zero point). If scales are fp16
or bfloat16, both are exact in fp32.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.config.weights import INT8, Codes, WeightFormat
from penstock.families.checkpoint.stored import CheckpointError, ReadPart, Rows, RowStep, StoredTensor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FLOAT_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
UNIT = 32  # codes of any number of bits that fill whole words of 32 bits
_GROUPS = (128, 64, 32, 16)  # of the grouped format
_RANKS = 8  # columns that share one scale can be divided among so many ranks, if their number allows it


def grouped(
    name: str,
    bits: int,
    group: int,
    columns: int,
    *,
    symmetric: bool = True,
    half: bool = False,
    ordered: bool = False,
    table: Codes | None = None,
) -> WeightFormat:
    """The format that holds codes of a matrix without loss, in groups of `group` values of a row (0: all of them).
    Scales are fp16 with `half` if there are no minima, else fp32. `table`: the one whose places the codes are."""
    spread = f"g{group}" if 0 < group < columns else "by row"
    nibbles = bits <= 4
    return replace(
        INT8,
        codes=table or ("nibbles" if nibbles else "bytes"),
        zero=128 if table or not nibbles else 8 if symmetric else 0,
        scales="f16" if half and symmetric else "f32",
        mins=not symmetric,
        group=_held_group(group, columns),
        ordered=ordered,
        name=f"{name} {spread}" + ("" if symmetric else " with zero points") + (" in act-order" if ordered else ""),
    )


def _held_group(group: int, columns: int) -> int:
    if 0 < group < columns:
        return next(size for size in _GROUPS if group % size == 0)
    return next((size for size in _GROUPS[:2] if columns % (_RANKS * size) == 0), 32)


def unpack(words: "NDArray[Any]", bits: int) -> "NDArray[np.uint8]":
    """The codes [rows, count] in rows of words of 32 bits, or of bytes, the lowest bits first. A code of 3 bits may lie
    in two words."""
    import numpy as np  # not at the top: see stored.py

    if bits == 3:
        pairs = words.astype(np.uint64)
        pairs[:, :-1] |= pairs[:, 1:] << np.uint64(32)
        bit = np.arange(words.shape[1] * 32 // bits) * bits
        wide = pairs.take(bit // 32, 1) >> (bit % 32).astype(np.uint64)
        return wide.astype(np.uint8) & np.uint8(7)
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    out = np.empty((*data.shape, 8 // bits), np.uint8)
    for place in range(8 // bits):
        out[..., place] = data >> np.uint8(bits * place) & np.uint8((1 << bits) - 1)
    return out.reshape(len(data), -1)


def words_of(codes: range, bits: int, words: int) -> tuple[range, slice]:
    """(words, slice): the words that hold some codes of a row of `words` words, from the first of a UNIT on, and these
    codes among those that are unpacked of them."""
    begin, end = codes.start // UNIT * bits, -(-codes.stop // UNIT) * bits
    skip = codes.start % UNIT
    return range(begin, min(end, words)), slice(skip, skip + codes.stop - codes.start)


def floats(data: "NDArray[np.uint8]", dtype: str) -> "NDArray[np.float32]":
    """Numbers of a file as fp32."""
    if dtype == "BF16":
        return (data.view("u2").astype("u4") << 16).view("f4")
    return data.view("f4" if dtype == "F32" else "f2").astype("f4")


def group_of(columns: range, group: int) -> "NDArray[np.intp]":
    """The group of each column, if groups are `group` columns in a row, or with 0 one for all."""
    import numpy as np

    places = np.arange(columns.start, columns.stop)
    return places // group if group else np.zeros_like(places)


def read_groups(
    order: StoredTensor | None, part: ReadPart, group: int, count: int, *, act_order: bool
) -> "NDArray[np.intp]":
    """The group of each column that is read, of `count` groups: as `order` [k] says, else `group` columns in a row.
    Raises CheckpointError."""
    import numpy as np

    in_order = group_of(part.columns, group)
    if order is None:
        return in_order
    size = order.row_bytes
    groups = part.read(order, part.columns, 0, size).view(f"i{size}").reshape(-1).astype(np.intp)
    if (groups == -1).all() or not (act_order or groups.any()):  # as files without an order have it
        return in_order
    if act_order and (groups.min() < 0 or groups.max() >= count):
        raise broken(order, f"names group {groups.max()} or {groups.min()}; there are groups 0 to {count - 1}")
    if not act_order and (groups != in_order).any():
        raise broken(order, "has groups whose columns are apart, but config.json does not say so (desc_act, actorder)")
    if act_order and len(groups) == order.rows:
        sizes = np.bincount(groups, minlength=count)
        if (sizes != np.bincount(group_of(range(order.rows), group))).any():
            raise broken(order, f"has groups of other sizes than {group} columns")
    return groups


def arranged(
    codes: "NDArray[np.uint8]",
    scales: "NDArray[np.float32]",
    zeros: "NDArray[np.uint8] | None",
    groups: "NDArray[np.intp]",
    columns: int,
    bits: int,
    fmt: WeightFormat,
) -> Rows:
    """Rows of unsigned codes [rows, k] in a format, as `coded` has them. `scales` and zero points [rows, groups] are
    those of the file, `groups` names that of each code. `columns` is the number of columns of the whole matrix."""
    import numpy as np

    order = None
    if fmt.ordered and len(groups) < columns:  # only experts, whose values are read as floats, are cut
        around = np.float32(1 << bits - 1) if zeros is None else zeros.take(groups, 1).astype(np.float32)
        return Rows((codes - around) * scales.take(groups, 1))
    if fmt.ordered:
        order = np.argsort(groups, kind="stable").astype(np.int32)
        codes, groups = codes.take(order, 1), groups.take(order)
    held = groups[:: fmt.group]
    zeros = None if zeros is None else zeros.take(held, 1)
    return replace(coded(codes, scales.take(held, 1), zeros, bits, fmt), order=order)


def coded(
    codes: "NDArray[np.uint8]",
    scales: "NDArray[np.float32]",
    zeros: "NDArray[np.uint8] | None",
    bits: int,
    fmt: WeightFormat,
) -> Rows:
    """Rows of unsigned codes [rows, k] in a format. `scales` and zero points [rows, groups] are those of the format's
    groups; without zero points they are 2^(bits - 1)."""
    if zeros is not None:
        return Rows(codes, scales, fmt, scales * (fmt.zero - zeros.astype("f4")))
    if shift := fmt.zero - (1 << bits - 1):
        codes = codes + codes.dtype.type(shift)
    return Rows(codes, scales, fmt)


def matrix(
    tensor: StoredTensor, what: WeightFormat | str, shape: tuple[int, int], block: tuple[int, int], step: RowStep
) -> StoredTensor:
    """A matrix [n, k] of codes, which `step` reads; `tensor` is its largest part. `what` is the format of the codes, or
    their name if they are read as floats. `block` is the number of values of a row that cannot be divided, and the
    bytes of their codes."""
    dtype = what if isinstance(what, str) else what.name
    size = shape[0] * (shape[1] // block[0]) * block[1]
    return replace(tensor, dtype=dtype, shape=shape, size=size, block=block, steps=(step,), read_by_step=True)


def expect(tensor: StoredTensor, of: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> StoredTensor:
    """Returns the tensor. Raises CheckpointError unless it has one of the dtypes and one of the shapes, none empty."""
    if tensor.dtype not in dtypes or tensor.shape not in shapes or 0 in tensor.shape:
        expected = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise broken(
            tensor,
            f"of {of!r} is {tensor.dtype} {list(tensor.shape)}; expected {expected} in {' or '.join(dtypes)}, and "
            "nothing empty",
        )
    return tensor


def part_of(tensor: StoredTensor, name: str, found: dict[str, StoredTensor]) -> StoredTensor:
    """Removes and returns the tensor `name`, which `tensor` needs. Raises CheckpointError if it is missing."""
    other = found.pop(name, None)
    if other is None:
        raise broken(tensor, f"has codes, but there is no {name!r} beside it")
    return other


def broken(tensor: StoredTensor, why: str) -> CheckpointError:
    return CheckpointError(f"{tensor.path}: {tensor.name!r} {why}")


def first_bytes(tensor: StoredTensor, most: int) -> bytes:
    """The first bytes of a tensor, at most `most`: of small ones, which say how others are read. Raises
    CheckpointError."""
    try:
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            return file.read(min(tensor.size, most))
    except OSError as error:
        raise CheckpointError(f"{tensor.path}: cannot be read: {error.strerror or error}") from error


def rows_between(part: ReadPart) -> tuple[int, int, slice]:
    """(first, count, slice): rows from the first to the last one that is read lie together, and the slice takes those
    that are read out of them."""
    rows = part.rows
    return rows[0], rows[-1] + 1 - rows[0], slice(None, None, rows.step)
