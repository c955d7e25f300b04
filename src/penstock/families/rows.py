"""The parts of tensors that attention is made of: fused projections, and rows in the order that the kernels rotate."""

from penstock.families.kinds.attention import GroupedQuerySpec, RopeSpec
from penstock.families.spec import TensorSource

Order = tuple[tuple[int, int, int], ...]


def head_order(rope: RopeSpec, head_dim: int) -> Order:
    """Returns the order in which the kernels need the rows of a head, as runs: see TensorSource.order. () keeps them.

    The kernels rotate element i with element i + head_dim / 2. So each half begins with its rotated elements, and those
    that are not rotated follow. Attention does not change: queries and keys have the same order.
    """
    dims = rope.dims or head_dim
    half, rest = dims // 2, (head_dim - dims) // 2
    if rope.scaling == "off" or (dims == head_dim and not rope.interleaved):
        return ()
    first, second = ((0, half, 2), (1, half, 2)) if rope.interleaved else ((0, half, 1), (half, half, 1))
    return (first, (dims, rest, 1), second, (dims + rest, rest, 1)) if rest else (first, second)


def fused_heads(tensor: str, spec: GroupedQuerySpec, *, by_group: bool = False) -> list[TensorSource]:
    """Returns the sources of q, k and v that a checkpoint has in one tensor: all of q, then k, then v. With `by_group`,
    each KV head has its query heads, its key and its value there, one after the other."""
    dim, order = spec.head_dim, head_order(spec.rope, spec.head_dim)
    if not by_group:
        rows = (spec.query_width, spec.kv_width, spec.kv_width)
        firsts = (0, rows[0], rows[0] + rows[1])
        each = zip(firsts, rows, (order, order, ()), strict=True)
        return [TensorSource(tensor, 0, count, first, order=own) for first, count, own in each]
    group = spec.num_heads // spec.num_kv_heads
    starts = [kv_head * (group + 2) * dim for kv_head in range(spec.num_kv_heads)]
    queries = [TensorSource(tensor, 0, group * dim, start, order=order) for start in starts]
    keys = [TensorSource(tensor, 0, dim, start + group * dim, order=order) for start in starts]
    values = [TensorSource(tensor, 0, dim, start + (group + 1) * dim) for start in starts]
    return [*queries, *keys, *values]
