"""Inputs for every op, of odd sizes, one row and none, and the calls that apply a provider to them.

`NAME_inputs` draws argument tuples of a dtype from a seed. `run_NAME` applies a provider's function to one tuple, and
returns the tensors to compare.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.config.facts import QueryTemperature
from penstock.kernels.attention import AttentionBatch, PagedAttention, unscaled
from penstock.kernels.batch_arrays import BATCH_ROW, CONTEXT, FIRST, LENGTH, UNIT_LINES
from penstock.kernels.linear import ACTIVATIONS, UNGATED, TorchLinear
from penstock.kernels.moe import TorchExperts
from penstock.kernels.recurrence import Recurrence, RecurrenceWeights
from penstock.kernels.routing import SOFTMAX, Routing, Scoring, SharedExpertOutput
from penstock.messages import Window

ROWS = (0, 1, 7, 33)


def normals(dtype: torch.dtype, seed: int) -> Callable[..., Tensor]:
    """A function from a shape to normal numbers. Each call draws the next ones."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(dtype)


def call(function: Any, arguments: tuple[Any, ...]) -> Any:
    """Runs an op in the way that suits most."""
    return function(*arguments)


def rms_norm_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in ROWS:
        x = normal(rows, 72)
        weight = normal(72)
        yield x, None, weight, 1e-6, 0.0
        yield x, normal(rows, 72), weight, 1e-5, 1.0
        yield x, normal(rows, 72), weight, 1e-5, 0.0, 0.3


def layer_norm_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in ROWS:
        x = normal(rows, 71) + 2
        weight = normal(71)
        yield x, None, weight, None, 1e-6
        yield x, normal(rows, 71), weight, normal(71), 1e-5


def linear_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 2, 3, 4, 5, 17, 515):
        yield normal(rows, 40), normal(53, 40), None, None, 1.0
        yield normal(rows, 37), normal(80, 37), normal(80), normal(rows, 80), 0.375
    yield normal(5, 8209), normal(301, 8209), normal(301), None, 1.0


def gated_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 3, 14):
        for activation in ACTIVATIONS:
            yield normal(rows, 40), normal(2 * 52, 40), None, activation
            yield normal(rows, 64), normal(2 * 48, 64), normal(2 * 48), activation


def activated_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 3, 14):
        for activation in UNGATED:
            yield normal(rows, 40), normal(52, 40), None, activation
            yield normal(rows, 64), normal(48, 64), normal(48), activation


def by_head_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 2, 5, 17, 515):
        yield normal(rows, 3 * 40), normal(3 * 48, 40), 3
    yield normal(5, 2 * 520), normal(2 * 160, 520), 2
    yield normal(9, 37), normal(53, 37), 1


def logits_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 9):
        yield normal(rows, 40), normal(131, 40), 1.0, 0.0
        yield normal(rows, 40), normal(131, 40), 0.25, 0.0
        yield normal(rows, 40), normal(131, 40), 2.0, 5.0


def embedding_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal, generator = normals(dtype, seed), torch.Generator().manual_seed(seed)
    for rows in (0, 1, 7, 33):
        for scale, first in ((1.0, None), (24**0.5, None), (1.5, 0), (1.0, 8)):
            yield torch.randint(19 if first is None else 31, (rows,), generator=generator), normal(19, 24), scale, first


def run_linear(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, bias, residual, scale = arguments
    result: Tensor = linear(x, linear.pack(weight, bias), residual, scale=scale)
    return result


def run_by_head(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, heads = arguments
    result: Tensor = linear.by_head(x, linear.pack(weight), heads)
    return result


def run_gated(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, bias, activation = arguments
    result: Tensor = linear.gated(x, linear.pack(weight, bias, gated=True), activation)
    return result


def run_activated(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, bias, activation = arguments
    result: Tensor = linear.activated(x, linear.pack(weight, bias), activation)
    return result


def run_logits(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, weight, scale, softcap = arguments
    result: Tensor = linear.logits(x, linear.pack(weight), scale=scale, softcap=softcap)
    return result


def run_embedding(linear: Any, arguments: tuple[Any, ...]) -> Tensor:
    token_ids, weight, scale, first = arguments
    result: Tensor = linear.rows(token_ids, linear.pack(weight), scale, weight.dtype, first=first)
    return result


def route_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """(logits, slots, normalize, scoring, bias, scales). Rounded logits have many ties."""
    normal = normals(torch.float32, seed)
    for tokens in (0, 1, 3, 70):
        for experts, slots in ((5, 2), (8, 8), (17, 1), (128, 8)):
            yield normal(tokens, experts) * 3, slots, experts % 2 == 0, SOFTMAX, None, None
            yield normal(tokens, experts).round(), slots, experts % 2 == 1, SOFTMAX, None, normal(experts)
        for scoring in (Scoring(sigmoid=True, scale=2.5), Scoring(True, 4, 2, True), Scoring(False, 6, 3, scale=1.5)):
            bias = normal(24) if scoring.sigmoid else None
            yield normal(tokens, 24), 4, scoring.sigmoid, scoring, bias, None


def experts_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """(x, routing, count, gate_up, down, biases, activation, first, shared, residual, weigh_inputs)."""
    normal, floats = normals(dtype, seed), normals(torch.float32, seed + 1)
    route = TorchExperts(TorchLinear()).route
    for tokens in (0, 1, 2, 9, 75):
        for held, hidden, width, slots in ((7, 40, 24, 3), (4, 37, 9, 1), (6, 64, 48, 6)):
            matrices = normal(held * 2 * width, hidden) / hidden**0.5, normal(held * hidden, width) / width**0.5
            x, residual = normal(tokens, hidden), normal(tokens, hidden)
            everywhere = route(floats(tokens, held), slots, normalize=True)
            yield x, everywhere, held, *matrices, (None, None), "silu", 0, None, None, False
            gate = floats(tokens, 1) if slots > 1 else None
            elsewhere = route(floats(tokens, held + 5), slots, normalize=False)
            yield (
                x,
                elsewhere,
                held,
                *matrices,
                (None, None),
                "gelu_tanh",
                3,
                SharedExpertOutput(normal(tokens, hidden), gate),
                residual,
                slots != 3,
            )


def biased_experts_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """As experts_inputs, with biases."""
    normal, floats = normals(dtype, seed), normals(torch.float32, seed + 1)
    for tokens in (0, 1, 2, 31):
        held, hidden, width, slots = 5, 40, 24, 2
        matrices = normal(held * 2 * width, hidden) / hidden**0.5, normal(held * hidden, width) / width**0.5
        routing = TorchExperts(TorchLinear()).route(floats(tokens, held), slots, normalize=True)
        biases = normal(held * 2 * width), normal(held * hidden)
        yield normal(tokens, hidden) * 3, routing, held, *matrices, biases, "swiglu_oai", 0, None, None, False


def ungated_experts_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """As experts_inputs, of experts without a gate."""
    normal, floats = normals(dtype, seed), normals(torch.float32, seed + 1)
    for tokens, activation in (
        (0, "relu"),
        (1, "relu"),
        (2, "relu_squared"),
        (9, "gelu"),
        (75, "relu_squared"),
    ):
        held, hidden, width, slots = 7, 40, 25, 3
        matrices = normal(held * width, hidden) / hidden**0.5, normal(held * hidden, width) / width**0.5
        routing = TorchExperts(TorchLinear()).route(floats(tokens, held), slots, normalize=True)
        shared = SharedExpertOutput(normal(tokens, hidden), None) if tokens > 1 else None
        yield normal(tokens, hidden), routing, held, *matrices, (None, None), activation, 0, shared, None, False


def run_route(experts: Any, arguments: tuple[Any, ...]) -> Routing:
    logits, slots, normalize, scoring, bias, scales = arguments
    options = {"normalize": normalize, "scoring": scoring, "bias": bias, "scales": scales}
    routing: Routing = experts.route(logits, slots, **options)
    return routing


def run_experts(experts: Any, arguments: tuple[Any, ...]) -> Tensor:
    x, routing, count, gate_up, down, biases, activation, first, shared, residual, weigh_inputs = arguments
    options = {"first": first, "shared": shared, "residual": residual, "weigh_inputs": weigh_inputs}
    gated = len(gate_up) == 2 * down.shape[1] * count
    matrices = experts.pack(gate_up, count, biases[0], gated=gated), experts.pack(down, count, biases[1])
    result: Tensor = experts(x, routing, *matrices, activation, **options)
    return result


_FULL = Window()
# (kv_heads, heads that share one, window, (queries, context) of each sequence, softcap, whether there are sinks)
_CAUSAL: tuple[tuple[int, int, Window, list[tuple[int, int]], float, bool], ...] = (
    (2, 2, _FULL, [(1, 1)], 0.0, False),
    (2, 3, _FULL, [(1, 17), (5, 5), (1, 4), (9, 40), (1, 33), (1, 8)], 0.0, False),
    (1, 4, Window(6), [(1, 30), (13, 29), (1, 6), (7, 7), (1, 3)], 0.0, False),
    (3, 1, _FULL, [(300, 301), (1, 200)], 0.0, False),
    (2, 2, Window(33), [(290, 300), (1, 200), (1, 1)], 0.0, False),
    (1, 5, _FULL, [(1, 1400), (40, 1100), (1, 513), (1, 512)], 0.0, False),  # several segments of the context
    (2, 1, Window(700), [(1, 1400), (5, 1030)], 0.0, False),
    (1, 4, Window(6), [(1, 30), (13, 29), (1, 3)], 2.0, False),
    (2, 2, Window(33), [(40, 50), (1, 200), (1, 1)], 0.0, True),
    (1, 2, _FULL, [(1, 1300), (3, 3), (1, 40)], 3.0, True),
    (2, 2, Window(6, chunked=True), [(1, 30), (1, 31), (13, 29), (7, 7), (1, 3), (1, 6)], 0.0, False),
    (1, 4, Window(64, chunked=True), [(100, 300), (1, 256), (1, 257), (70, 70)], 2.0, True),
    (1, 2, Window(700, chunked=True), [(1, 1400), (1, 1401), (40, 1430), (1, 650)], 0.0, False),
    (2, 2, _FULL, [], 0.0, False),
)
_BIDIRECTIONAL: tuple[tuple[int, int, Window, list[tuple[int, int]], float, bool], ...] = (
    (2, 1, _FULL, [(1, 1)], 0.0, False),
    (3, 1, _FULL, [(17, 17), (1, 1), (300, 300), (40, 40)], 0.0, False),
    (2, 2, Window(9), [(70, 70), (5, 5), (16, 16)], 0.0, False),
    (2, 1, Window(130), [(1100, 1100), (513, 513)], 0.0, False),
    (1, 2, _FULL, [(1030, 1030), (9, 9)], 0.0, False),
    (2, 1, _FULL, [], 0.0, False),
)


def attention_inputs(
    dtype: torch.dtype, seed: int, head_dim: int = 48, *, causal: bool = True
) -> Iterator[tuple[Any, ...]]:
    """(query, keys, values, batch, scale, softcap, sinks): mixed lengths, scattered blocks, and garbage outside the
    sequences."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    size = 16
    for kv_heads, groups, window, lens, softcap, has_sinks in _CAUSAL if causal else _BIDIRECTIONAL:
        query_lens, context_lens = np.array(lens, np.int64).reshape(-1, 2).T
        widest = max((-(-context // size) for _, context in lens), default=0)
        num_blocks = 1 + len(lens) * widest
        tables = 1 + rng.permutation(num_blocks - 1).reshape(len(lens), widest)
        tokens = int(query_lens.sum())
        heads = torch.randn((tokens, kv_heads * (groups + 1), head_dim), generator=generator).to(dtype)
        query = heads[:, : kv_heads * groups]  # as it is sliced from a fused projection
        pages = torch.randn((num_blocks, 2, kv_heads, size, head_dim), generator=generator).to(dtype)
        pages[0] = 0.0
        start = np.concatenate([[0], np.cumsum(query_lens)])
        batch = AttentionBatch(size, window, start, context_lens, tables, causal)
        sinks = torch.randn(kv_heads * groups, generator=generator) if has_sinks else None
        yield query, pages[:, 0], pages[:, 1], batch, head_dim**-0.5, softcap, sinks


def store_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of `store`, with what `rotation` takes instead of the rotation."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, size, head_dim = 4, 2, 16, 48

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    radians = 100.0 ** -torch.linspace(0, 1, head_dim // 2)
    radians[-5:] = 0.0  # elements that are not rotated
    frequencies = torch.stack((radians, torch.linspace(1.0, 1.25, head_dim // 2)))
    for tokens in (0, 1, 7, 70):
        pages = torch.zeros(9, 3, 2, kv_heads, size, head_dim, dtype=dtype)
        slots = torch.randperm(9 * size, generator=generator)[:tokens]
        positions = torch.randint(5000, (tokens,), generator=generator)
        qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim)
        for weight, offset, norm in (
            (None, 0.0, "heads"),
            (normal(heads + kv_heads, head_dim), 0.0, "heads"),
            (normal(heads + kv_heads, head_dim), 1.0, "heads"),
            (normal(heads + kv_heads, head_dim), 0.0, "whole"),
            (normal(heads + kv_heads, head_dim), 0.0, "centered"),
            (normal(heads + 2 * kv_heads, head_dim), 0.0, "heads"),
        ):
            cache = pages[:, 1, 0], pages[:, 1, 1], slots // size, slots % size
            temperature = QueryTemperature(300, 0.1, first=1) if offset or norm == "whole" else None
            yield qkv, heads, weight, (positions, frequencies, temperature), *cache, 1e-6, offset, norm


def run_store(attention: PagedAttention, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, values). Keys and values come back with a token in each row."""
    qkv, heads, weight, (positions, frequencies, temperature), keys, values, *rest, norm = arguments
    keys, values = keys.clone(), values.clone()
    rotation = attention.rotation(positions, frequencies, qkv.dtype, temperature)
    query = attention.store(qkv, heads, weight, rotation, keys, values, *rest, norm=norm)
    # Arranging the elements' numbers shows where each element of a page lies.
    size = keys[0, 0].numel()
    numbers = torch.arange(size, dtype=torch.int32 if keys.itemsize == 4 else torch.int16).view(keys.shape[-2:])
    for pages, are_keys in ((keys, True), (values, False)):
        place = attention.arrange(numbers, keys=are_keys).flatten().argsort()
        pages.copy_(pages.flatten(-2)[..., place].view(pages.shape))
    return query, keys, values


def run_attention(attention: PagedAttention, arguments: tuple[Any, ...]) -> Tensor:
    query, keys, values, batch, scale, softcap, sinks = arguments
    keys, values = attention.arrange(keys, keys=True), attention.arrange(values, keys=False)
    prepared = attention.prepare(batch, keys)
    return attention(query.contiguous(), keys, values, prepared, scale, softcap=softcap, sinks=sinks)


def store_latents_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """Arguments of `store_latents`, with positions and frequencies instead of the rotation."""
    normal, generator = normals(dtype, seed), torch.Generator().manual_seed(seed)
    heads, rank, rope, size = 3, 32, 16, 16
    frequencies = unscaled(100.0 ** -torch.linspace(0, 1, rope // 2))
    for tokens in (0, 1, 7, 70):
        pages = torch.zeros(9, 3, 1, size, rank + rope, dtype=dtype)[:, 1]
        slots = torch.randperm(9 * size, generator=generator)[:tokens]
        positions = torch.randint(5000, (tokens,), generator=generator)
        parts = normal(tokens, heads * rank), normal(tokens, heads * rope), normal(tokens, rank), normal(tokens, rope)
        yield *parts, (positions, frequencies), pages, slots // size, slots % size


def latent_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """(query, pages, batch, scale, rank): sequences of all lengths, over one head of pages."""
    for rank, rope in ((32, 16), (144, 64)):
        for query, keys, _, batch, scale, softcap, sinks in attention_inputs(dtype, seed, rank + rope):
            if not softcap and sinks is None:  # all queries' heads meet the first of the keys'
                yield query, keys[:, :1].contiguous(), batch, scale, rank


def run_store_latents(attention: Any, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """(queries, pages). Pages come back with a token in each row."""
    *parts, (positions, frequencies), pages, blocks, offsets = arguments
    pages = pages.clone()
    rotation = attention.rotation(positions, frequencies, pages.dtype)
    query = attention.store_latents(*parts, rotation, pages, blocks, offsets)
    numbers = torch.arange(pages[0, 0].numel(), dtype=torch.int32 if pages.itemsize == 4 else torch.int16)
    place = attention.arrange(numbers.view(pages.shape[-2:]), keys=True).flatten().argsort()
    return query, pages.flatten(-2)[..., place].view(pages.shape)


def run_latent(attention: Any, arguments: tuple[Any, ...]) -> Tensor:
    query, pages, batch, scale, rank = arguments
    pages = attention.arrange(pages, keys=True)
    prepared = attention.prepare(batch, pages)
    result: Tensor = attention.over_latents(query.contiguous(), pages, prepared, scale, rank)
    return result


def sigmoid_gate_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    normal = normals(dtype, seed)
    for rows in (0, 1, 7, 33):
        yield normal(rows, 72), normal(rows, 72)


def recurrence_inputs(dtype: torch.dtype, seed: int) -> Iterator[tuple[Any, ...]]:
    """Sequences that begin and that go on, in rows of any order: delta nets and Mamba 2."""
    normal, floats = normals(dtype, seed), normals(torch.float32, seed + 1)
    for key_heads, heads, key_dim, value_dim, taps in ((1, 1, 16, 16, 2), (2, 6, 24, 152, 4), (3, 3, 7, 9, 3)):
        width = heads * value_dim
        channels = 2 * key_heads * key_dim + width
        for mamba, tiled in ((False, False), (False, True), (True, False)):
            weights = RecurrenceWeights(
                conv=floats(taps, channels),
                conv_bias=floats(channels) if mamba else None,
                decay=-floats(heads).exp(),
                step_bias=floats(heads),
                skip=floats(heads) if mamba else None,
                norm=floats(width if mamba else value_dim),
                key_heads=key_heads,
                key_dim=key_dim,
                norm_width=width // key_heads if mamba else value_dim,
                eps=1e-2,
                tiled=tiled,
            )
            for lengths, before in (((1,), (0,)), ((1, 5, 1, 9), (3, 0, 0, 2)), ((), ())):
                units = torch.zeros(len(lengths), UNIT_LINES, dtype=torch.int32)
                for i, (length, context) in enumerate(zip(lengths, before, strict=True)):
                    line = {FIRST: sum(lengths[:i]), LENGTH: length, CONTEXT: context + length, BATCH_ROW: 4 - i}
                    for place, number in line.items():
                        units[i, place] = number
                tokens = sum(lengths)
                rates = floats(tokens, heads if mamba else 2 * heads)
                states = floats(5, weights.matrices + (taps - 1) * channels)
                yield normal(tokens, channels + width), rates, units, states, weights


def run_recurrence(function: Recurrence, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The output of units that begin their sequences, and of those given after them. How a state lies in memory is the
    provider's own."""
    inputs, rates, units, states, weights = arguments
    states, begun = states.clone(), units.clone()
    begun[:, CONTEXT] = begun[:, LENGTH]
    first, second = (
        function(given, rates, each.T.contiguous().T, states, weights)
        for given, each in ((inputs, begun), (inputs.flip(0), units))
    )
    return first, second
