"""The kernels of paged attention (Dao, FlashAttention-2, 2023, and Flash-Decoding, 2023)."""

import triton
import triton.language as tl

from penstock.kernels.triton.overlap import await_inputs

# Arguments that change from step to step: Triton must not compile for their values.
_COUNTS = ["capacity", "decodes", "prompts", "table_stride"]
_STAGED = ["sequences", "tables"]


@triton.jit
def _place(sequences, capacity, decodes, prompts, tile, QUERIES: tl.constexpr):
    """(sequence, first of its queries) for a tile of QUERIES queries, among the sequences with several queries.

    The n-th sequence, with b queries before it, begins at tile b // QUERIES + n. This leaves room for all tiles of the
    sequences before it; tiles left over are empty.
    """
    low = decodes
    high = decodes + prompts
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(sequences + 4 * capacity + middle)
        if before // QUERIES + middle - decodes <= tile:
            low = middle
        else:
            high = middle
    before = tl.load(sequences + 4 * capacity + low)
    return low, (tile - (before // QUERIES + low - decodes)) * QUERIES


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Window.first_seen, for a window of some tokens."""
    if CHUNKED:
        return position // WINDOW * WINDOW
    else:
        return tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def _as_fp16(rows):
    """(rows in fp16, the unit of each row), of rows in bf16. A unit is a power of two, so only values below 2**-14 of a
    row's largest lose bits."""
    wide = rows.to(tl.float32)
    largest = tl.max(tl.abs(wide), 1).to(tl.int32, bitcast=True)
    unit = tl.maximum(largest & 0x7F800000, 1 << 23).to(tl.float32, bitcast=True)
    return (wide / unit[:, None]).to(tl.float16), unit


@triton.jit
def _load_scales(place, real):
    """Loads the fp32 scales of a tile's keys. As a column that is summed, each is loaded by one thread; otherwise all
    threads whose scores it multiplies would load it."""
    column = place[:, None] + tl.arange(0, 1)[None, :]
    return tl.sum(tl.load(column, mask=real[:, None], other=0.0), 1)


@triton.jit
def _log_of_scale(scale):
    """About log2(2**-14 scale), at least -74. A positive float's bits, as an integer, are nearly a logarithm."""
    bits = tl.maximum(scale.to(tl.int32, bitcast=True), 67 << 23)
    return bits.to(tl.float32) * (1.0 / (1 << 23)) - (127.0 + 14.0)


@triton.jit
def _halves(pairs, DTYPE: tl.constexpr):
    """(the first value of each pair, the second) of pairs of fp8 values, read as int16."""
    first = (pairs & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    second = ((pairs >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return first.to(DTYPE), second.to(DTYPE)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_STAGED)
def attend(
    query,
    keys,
    values,  # with PAIRS, fp8 in pairs, as int16: registers then get a tile of them as they get one of bf16
    key_scales,
    value_scales,
    out,
    sinks,  # fp32 [heads]
    partial,  # fp32 [decoding sequences, heads, SEGMENTS, HEAD_DIM]
    sums,  # fp32 [2, decoding sequences, heads, SEGMENTS]: the largest score, and the sum of weights
    sequences,
    tables,
    capacity,  # of `sequences`
    decodes,
    prompts,
    query_stride,
    table_stride,
    block_stride,
    head_stride,
    scale,  # of scores, in units of log 2
    softcap,  # likewise
    heads,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share a KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    QUERIES: tl.constexpr,  # of a tile
    SEGMENTS: tl.constexpr,
    SCALED: tl.constexpr,  # whether pages are fp8, with scales
    SOFTCAP: tl.constexpr,  # whether scores are bounded
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,  # whether values are read as pairs
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Each program computes one tile of queries, for one KV head and one segment of the context."""
    await_inputs(OVERLAP)
    kv_head = tl.program_id(1)
    segment = tl.program_id(2)
    if DECODE:
        sequence = tl.program_id(0)
        first = 0
    else:
        # The last tiles of a prompt see the most keys, so they start first.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        sequence, first = _place(sequences, capacity, decodes, prompts, tile, QUERIES)
    token = tl.load(sequences + sequence).to(tl.int64)
    count = tl.load(sequences + capacity + sequence)
    context = tl.load(sequences + 2 * capacity + sequence)
    table = tables + tl.load(sequences + 3 * capacity + sequence).to(tl.int64) * table_stride
    if first >= count:
        return

    row = tl.arange(0, ROWS)
    nth = first + row // GROUP
    head = kv_head * GROUP + row % GROUP
    asking = (row < QUERIES * GROUP) & (nth < count)
    query_at = context - count + nth
    element = tl.arange(0, WIDTH)
    whole = element < HEAD_DIM
    q = tl.load(
        query + (token + nth)[:, None] * query_stride + (head * HEAD_DIM)[:, None] + element[None, :],
        mask=asking[:, None] & whole[None, :],
        other=0.0,
    )
    if SCALED and q.dtype == tl.bfloat16:
        # A GPU converts fp8 to fp16 in one instruction, to bf16 in five.
        q, unit = _as_fp16(q)
        scale *= unit[:, None]

    end = context - count + tl.minimum(first + QUERIES, count)
    seen = 0  # the first key that the tile sees: table entries of blocks before it are undefined
    if WINDOW > 0:
        seen = _first_seen(context - count + first, WINDOW, CHUNKED)
    begin = seen // KEYS * KEYS
    if SEGMENTS > 1:
        length = tl.cdiv(tl.cdiv(end - begin, KEYS), SEGMENTS) * KEYS
        begin += segment * length
        end = tl.minimum(end, begin + length)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH // 2 if PAIRS else WIDTH], tl.float32)
    second_result = result  # of the second value of each pair
    pair = tl.arange(0, WIDTH // 2)
    for start in range(begin, end, KEYS):
        key_at = start + tl.arange(0, KEYS)
        real = (key_at >= seen) & (key_at < end)
        block = tl.load(table + key_at // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
        page = block * block_stride + kv_head * head_stride
        slot = key_at % BLOCK_SIZE
        where = (page + slot * HEAD_DIM)[:, None] + element[None, :]
        readable = real[:, None] & whole[None, :]
        k = tl.load(keys + where, mask=readable, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SCALED:
            beside = (page + BLOCK_SIZE * HEAD_DIM) // 4 + slot
            scores *= _load_scales(key_scales + beside, real)[None, :]
        if SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        visible = real[None, :] & (key_at[None, :] <= query_at[:, None])
        if WINDOW > 0:
            visible &= key_at[None, :] >= _first_seen(query_at, WINDOW, CHUNKED)[:, None]
        scores = tl.where(visible, scores, float("-inf"))
        if SCALED:
            by_value = _load_scales(value_scales + beside, real)
            # Weights times the scales of values are then at most 2**15, which fp16 holds, and as large as possible.
            new_largest = tl.maximum(largest, tl.max(scores + _log_of_scale(by_value)[None, :], 1))
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1))
        reference = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # while a row has seen no key
        weights = tl.exp2(scores - reference[:, None])
        decay = tl.exp2(largest - reference)
        total = total * decay + tl.sum(weights, 1)
        if SCALED:
            weights *= by_value[None, :]
        weights = weights.to(q.dtype)
        if PAIRS:
            where = ((page + slot * HEAD_DIM) // 2)[:, None] + pair[None, :]
            pairs = tl.load(values + where, mask=real[:, None] & (pair < HEAD_DIM // 2)[None, :], other=0)
            v, second = _halves(pairs, q.dtype)
            second_result = second_result * decay[:, None] + tl.dot(weights, second, input_precision=PRECISION)
        else:
            v = tl.load(values + where, mask=readable, other=0.0).to(q.dtype)
        result = result * decay[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        largest = new_largest

    if PAIRS:
        result = tl.interleave(result, second_result)
    if SEGMENTS > 1:
        line = (sequence.to(tl.int64) * heads + head) * SEGMENTS + segment
        tl.store(partial + line[:, None] * HEAD_DIM + element[None, :], result, mask=asking[:, None] & whole[None, :])
        tl.store(sums + line, largest, mask=asking)
        tl.store(sums + decodes.to(tl.int64) * heads * SEGMENTS + line, total, mask=asking)
    else:
        if SINKS:
            sink = tl.load(sinks + head, mask=asking, other=0.0) * 1.4426950408889634
            most = tl.maximum(largest, sink)
            result *= tl.exp2(largest - most)[:, None]
            total = total * tl.exp2(largest - most) + tl.exp2(sink - most)
        result /= tl.where(total == 0.0, 1.0, total)[:, None]
        target = out + ((token + nth) * heads + head)[:, None] * HEAD_DIM + element[None, :]
        tl.store(target, result.to(out.dtype.element_ty), mask=asking[:, None] & whole[None, :])


@triton.jit(do_not_specialize=["decodes"], do_not_specialize_on_alignment=["sequences"])
def merge(
    partial,
    sums,
    sequences,
    out,
    sinks,
    decodes,
    heads,
    HEAD_DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SINKS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Merge the segments of one decoding sequence and head."""
    await_inputs(OVERLAP)
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    segment = tl.arange(0, SEGMENTS)
    element = tl.arange(0, WIDTH)
    whole = (element < HEAD_DIM)[None, :]
    line = (sequence * heads + head) * SEGMENTS + segment
    largest = tl.load(sums + line)
    total = tl.load(sums + decodes.to(tl.int64) * heads * SEGMENTS + line)
    most = tl.max(largest, 0)
    if SINKS:
        sink = tl.load(sinks + head) * 1.4426950408889634
        most = tl.maximum(most, sink)
    share = tl.exp2(largest - tl.where(most == float("-inf"), 0.0, most))
    parts = tl.load(partial + line[:, None] * HEAD_DIM + element[None, :], mask=whole, other=0.0)
    mass = tl.sum(total * share, 0)
    if SINKS:
        mass += tl.exp2(sink - most)
    result = tl.sum(parts * share[:, None], 0) / tl.where(mass == 0.0, 1.0, mass)
    token = tl.load(sequences + sequence).to(tl.int64)
    target = out + (token * heads + head) * HEAD_DIM + element
    tl.store(target, result.to(out.dtype.element_ty), mask=element < HEAD_DIM)
