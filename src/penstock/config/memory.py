"""Sizes memory before it is used: how much a model takes with given settings, and how many KV blocks fit.

`penstock plan`, which loads no model, and the runners, which allocate, use the same arithmetic.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from penstock.config.engine import EngineConfig
from penstock.config.facts import MixtureFacts, ModelFacts
from penstock.config.graphs import graph_sizes
from penstock.config.sizes import format_bytes
from penstock.config.split import Split
from penstock.config.weights import stored_as, weights_bytes, widened_bytes
from penstock.messages import MemoryRow

RUNTIME_BYTES = 300 << 20  # Python, torch and its libraries, as measured with nothing loaded
TRANSFORMERS_BYTES = 200 << 20  # its modules, as measured
CONTEXT_BYTES = 768 << 20  # of a GPU: CUDA's context, its libraries and compiled kernels; measured when they are loaded
GRAPH_BYTES = 8 << 20  # of a captured step, besides what all share
KV_SHARE = 0.5  # of what everything else leaves; the rest is for the page cache and other programs. On a GPU: all
ADVISED_UTILIZATION = 0.95  # the most that an error advises: a CUDA context takes memory that is not counted
LOGIT_COPIES = 3  # a row's logits, and two scratch rows of the sampler (sorting, noise)
PROMPT_LOGPROB_ROWS = 128  # prompt logprobs are computed in slices of so many rows,
PROMPT_LOGPROB_COPIES = 2  # each with its logits and their log-softmax
# The least with which a chat is of use, for a machine with little memory.
SMALLEST: Mapping[str, int] = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 64}
LOGIT_SIZE = 4  # logits are fp32 in every dtype
STATE_SIZE = 4  # and so are states


class DoesNotFit(ValueError):
    """The model does not fit with these settings; the message names the one to change."""


@dataclass(frozen=True)
class MemoryPlan:
    """The memory table, whose last row is the free memory."""

    rows: tuple[MemoryRow, ...]
    num_blocks: tuple[int, ...]  # per KV group, the reserved block 0 included
    kv_bytes: int  # of those blocks
    kv_tokens: int  # that a group with full attention holds


def size_ranks(ranks: Sequence[ModelFacts], engine: EngineConfig, available: Sequence[int]) -> tuple[MemoryPlan, ...]:
    """The memory plan of each rank, which has `available[rank]` bytes. All ranks get as many KV blocks as the one with
    the least room, because they share block ids.

    Raises DoesNotFit, which names the rank.
    """
    each = list(zip(ranks, available, strict=True))
    plans = [_size_rank(rank, facts, engine, memory) for rank, (facts, memory) in enumerate(each)]
    tokens = min(plan.kv_tokens for plan in plans)
    return tuple(plan_tokens(facts, engine, memory, tokens, _fixed_rows(facts, engine)) for facts, memory in each)


def gpu_budget(total: int, engine: EngineConfig) -> int:
    """Bytes of a GPU's memory that the engine may take."""
    return int(total * engine.gpu_memory_utilization)


def size_memory(
    facts: ModelFacts, engine: EngineConfig, available_bytes: int, measured: tuple[MemoryRow, ...] | None = None
) -> MemoryPlan:
    """The memory plan for `available_bytes`. Raises DoesNotFit if not even one sequence of max_model_len fits.

    The KV pool gets what max_num_seqs sequences of max_model_len need, but at most `engine.kv_cache_bytes`. Without
    that setting it gets at most half of the memory that everything else leaves, or what one sequence needs; on a GPU,
    all of it. `measured` rows replace those that are computed for everything but the KV pool.
    """
    fixed = _fixed_rows(facts, engine) if measured is None else measured
    left = available_bytes - sum(row.bytes for row in fixed)
    one = pool_bytes(facts, engine, tokens_of_one_sequence(facts, engine))
    if left < one:
        raise DoesNotFit(_remedy(facts, engine, available_bytes, fixed))
    budget = engine.kv_cache_bytes
    if budget is None:
        budget = kv_budget(engine, left, one)
    if budget > left:
        raise DoesNotFit(
            f"a KV cache of {format_bytes(budget)} does not fit: {format_bytes(left)} are left of the available "
            f"{format_bytes(available_bytes)}; set --kv-cache-memory {_mebibytes(left)} or less"
        )
    if budget < one:
        raise DoesNotFit(
            f"one sequence of {engine.max_model_len} tokens needs a KV cache of {format_bytes(one)}, the limit is "
            f"{format_bytes(budget)}; set --kv-cache-memory {_mebibytes(one, up=True)} or more"
        )
    tokens = min(fit_tokens(facts, engine, budget), _round_up(engine.max_num_seqs * engine.max_model_len, engine))
    return plan_tokens(facts, engine, available_bytes, tokens, fixed)


def reserved_blocks(facts: ModelFacts, engine: EngineConfig, plan: MemoryPlan) -> tuple[int, ...]:
    """KV blocks per group for which address space is reserved: those of the plan, or more if the cache may grow."""
    if engine.kv_reserve_bytes is None:
        return plan.num_blocks
    most = _round_up(engine.max_num_seqs * engine.max_model_len, engine)
    return max(
        plan.num_blocks, pool_blocks(facts, engine, min(fit_tokens(facts, engine, engine.kv_reserve_bytes), most))
    )


def _size_rank(rank: int, facts: ModelFacts, engine: EngineConfig, available: int) -> MemoryPlan:
    with naming_rank(rank, engine.split):
        return size_memory(facts, engine, available)


@contextmanager
def naming_rank(rank: int, split: Split) -> Iterator[None]:
    """Adds the rank to the message of a DoesNotFit, if there are several ranks."""
    try:
        yield
    except DoesNotFit as error:
        if split.world == 1:
            raise
        raise DoesNotFit(f"rank {rank} of {split.world}: {error}") from None


def memory_table(facts: ModelFacts, engine: EngineConfig, num_blocks: Sequence[int]) -> tuple[MemoryRow, ...]:
    """The memory table of a rank with `num_blocks` KV blocks per group, without the free memory."""
    return _with_pool(facts, engine, num_blocks, _fixed_rows(facts, engine))


def _with_pool(
    facts: ModelFacts, engine: EngineConfig, num_blocks: Sequence[int], fixed: tuple[MemoryRow, ...]
) -> tuple[MemoryRow, ...]:
    first, *others = fixed
    return first, _pool_row(facts, engine, num_blocks), *others


def plan_tokens(
    facts: ModelFacts, engine: EngineConfig, available: int, tokens: int, fixed: tuple[MemoryRow, ...]
) -> MemoryPlan:
    """The memory plan with a KV pool for `tokens` tokens, which must fit beside the `fixed` rows."""
    blocks = pool_blocks(facts, engine, tokens)
    rows = _with_pool(facts, engine, blocks, fixed)
    left = available - sum(row.bytes for row in rows)
    share = f", {engine.gpu_memory_utilization:g} of the GPU's" if engine.device == "cuda" else ""
    free = MemoryRow("free", left, f"of {format_bytes(available)} available{share}")
    return MemoryPlan((*rows, free), blocks, blocks_bytes(facts, engine, blocks), tokens)


def _pool_row(facts: ModelFacts, engine: EngineConfig, num_blocks: Sequence[int]) -> MemoryRow:
    if facts.pooling is not None and facts.pooling.encoder:
        return MemoryRow("KV cache", 0, "an encoder keeps nothing between steps")
    tokens = (max(num_blocks) - 1) * engine.block_size
    kept = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    note = f"{tokens:,} tokens in blocks of {engine.block_size}, {kept}"
    if engine.device == "cpu":
        note += "; the most, taken as it is used"
    if any(group.window for group in facts.groups):
        note += f"; groups {', '.join(str(g.window) if g.window else 'full' for g in facts.groups)}"
    return MemoryRow("KV cache", blocks_bytes(facts, engine, num_blocks), note)


def fixed_bytes(facts: ModelFacts, engine: EngineConfig) -> int:
    """Bytes of everything but the KV cache."""
    return sum(row.bytes for row in _fixed_rows(facts, engine))


def kv_budget(engine: EngineConfig, left: int, wanted: int) -> int:
    """Returns the KV pool's share of the memory that is left: half, or `wanted` if that is more. On a GPU it gets all:
    there gpu_memory_utilization keeps memory free for other programs."""
    return left if engine.device == "cuda" else max(int(left * KV_SHARE), min(wanted, left))


def pool_blocks(facts: ModelFacts, engine: EngineConfig, tokens: int) -> tuple[int, ...]:
    """Blocks per KV group that hold `tokens` tokens, and the null block.

    A group with a window holds no more than its running sequences see: the window of each, which may begin and end
    within a block, and the tokens of one step.
    """
    size = engine.block_size
    blocks = []
    for group in facts.groups:
        seen = engine.max_num_seqs * (_round_up(group.window.tokens, engine) + 2 * size) + engine.max_num_batched_tokens
        held = min(tokens, seen) if group.window else tokens
        blocks.append(1 + -(-held // size))
    return tuple(blocks)


def pool_bytes(facts: ModelFacts, engine: EngineConfig, tokens: int) -> int:
    """Bytes of a KV pool for `tokens` tokens, all groups together."""
    return blocks_bytes(facts, engine, pool_blocks(facts, engine, tokens))


def blocks_bytes(facts: ModelFacts, engine: EngineConfig, num_blocks: Sequence[int]) -> int:
    """Bytes of so many blocks per KV group."""
    return sum(count * size for count, size in zip(num_blocks, block_bytes(facts, engine), strict=True))


def block_bytes(facts: ModelFacts, engine: EngineConfig) -> tuple[int, ...]:
    """Bytes of one block per KV group, all its layers together."""
    size, element = engine.block_size, engine.kv_element_size
    return tuple(group.layers * group.page.block_bytes(size, element) for group in facts.groups)


def token_bytes(facts: ModelFacts, engine: EngineConfig) -> tuple[int, ...]:
    """Bytes per KV group that one token adds to the cache."""
    return tuple(size // engine.block_size for size in block_bytes(facts, engine))


def fit_tokens(facts: ModelFacts, engine: EngineConfig, budget: int) -> int:
    """The most tokens, in whole blocks, whose pool takes at most `budget` bytes; 0 if not one block fits. If all layers
    have windows, any number may fit: then at least max_num_seqs * max_model_len."""
    low, high = 0, budget // max(min(block_bytes(facts, engine)), 1) + 1
    high = max(high, -(-engine.max_num_seqs * engine.max_model_len // engine.block_size))
    while low < high:
        middle = (low + high + 1) // 2
        if pool_bytes(facts, engine, middle * engine.block_size) <= budget:
            low = middle
        else:
            high = middle - 1
    return low * engine.block_size


def tokens_of_one_sequence(facts: ModelFacts, engine: EngineConfig) -> int:
    """Tokens of the pool that one sequence of max_model_len needs: if all layers have windows, this may be less than
    its length."""
    windows = [group.window.tokens for group in facts.groups]
    if 0 in windows:
        return _round_up(engine.max_model_len, engine)
    seen = _round_up(max(windows), engine) + 2 * engine.block_size + engine.max_num_batched_tokens
    return min(_round_up(engine.max_model_len, engine), _round_up(seen, engine))


def workspace_bytes(facts: ModelFacts, max_num_seqs: int) -> int:
    """Bytes of logits and the sampler's scratch, or of a slice of prompt logprobs if that is more. If several ranks
    compute the logits, each has its part, and the one that samples has the whole too."""
    whole = max(LOGIT_COPIES * max_num_seqs, PROMPT_LOGPROB_COPIES * PROMPT_LOGPROB_ROWS) * facts.vocab_size
    part = max(max_num_seqs, PROMPT_LOGPROB_ROWS) * facts.head_part
    return (whole * facts.samples + part) * LOGIT_SIZE


def activation_bytes(facts: ModelFacts, engine: EngineConfig) -> int:
    """Bytes of the tensors alive at once in the widest part of a layer; on a CPU of K and V gathered for attention, on
    a GPU of codes that are widened."""
    hidden = facts.hidden_size
    attention = 2 * hidden + facts.widest_attention  # residual, normed
    mlp = 2 * hidden + 4 * facts.widest_mlp  # residual, normed, gate and up, their product and its scratch
    per_token = max(attention, mlp) * engine.element_size + 2 * hidden * 4  # norms run in fp32
    if facts.mixture is not None:
        per_token += _experts_bytes(facts.mixture, hidden, engine.element_size)
    per_token += exchanged_bytes(engine.split, hidden * engine.element_size)
    gathered = 0 if engine.device == "cuda" else engine.max_model_len * facts.widest_gathered * engine.element_size
    widened = widened_bytes(facts, engine, engine.max_num_batched_tokens)
    return engine.max_num_batched_tokens * per_token + gathered + widened


def exchanged_bytes(split: Split, hidden_bytes: int) -> int:
    """Bytes per token of hidden states that ranks exchange. A sum holds those of every tensor rank twice: as received
    and as added. A stage holds those it received, and one copy being sent per outstanding plan."""
    summed = 2 * split.tensor if split.tensor > 1 else 0
    sent = split.pipeline + 1 if split.pipeline > 1 else 0
    return (summed + sent) * hidden_bytes


def _experts_bytes(mixture: MixtureFacts, hidden: int, element_size: int) -> int:
    """Bytes per token: the router's logits, and for each chosen expert its id and weight, the fp32 output, and the
    values between its two products, as computed and as multiplied."""
    each = 12 + 4 * hidden + (element_size + 4) * mixture.intermediate_size
    return 4 * mixture.experts + mixture.per_token * each


def _fixed_rows(facts: ModelFacts, engine: EngineConfig) -> tuple[MemoryRow, ...]:
    return (
        MemoryRow("weights", weights_bytes(facts, engine), weights_note(facts, engine)),
        MemoryRow(
            "activations", activation_bytes(facts, engine), f"steps of {engine.max_num_batched_tokens} tokens at most"
        ),
        MemoryRow(
            "workspace",
            workspace_bytes(facts, engine.max_num_seqs + engine.max_step_drafts),
            _workspace_note(facts, engine.max_num_seqs),
        ),
        *_state_rows(facts, engine),
        *_runtime_rows(facts, engine),
    )


def _state_rows(facts: ModelFacts, engine: EngineConfig) -> tuple[MemoryRow, ...]:
    if not facts.state_elements:
        return ()
    note = f"float32, of each of {engine.max_num_seqs} sequences"
    return (MemoryRow("states", states_bytes(facts, engine.max_num_seqs), note),)


def states_bytes(facts: ModelFacts, sequences: int) -> int:
    """Bytes of the states of so many sequences."""
    return sequences * facts.state_elements * STATE_SIZE


def weights_note(facts: ModelFacts, engine: EngineConfig) -> str:
    stored = [matrix.stored for matrix in facts.matrices if not matrix.router]
    return f"{facts.num_parameters / 1e6:,.1f} M parameters, {stored_as(engine, stored=stored)}"


def _runtime_rows(facts: ModelFacts, engine: EngineConfig) -> tuple[MemoryRow, ...]:
    if facts.transformers:
        return (MemoryRow("runtime", RUNTIME_BYTES + TRANSFORMERS_BYTES, "Python, torch and transformers"),)
    if engine.device == "cpu":
        return (MemoryRow("runtime", RUNTIME_BYTES, "Python and torch"),)
    context = MemoryRow("runtime", CONTEXT_BYTES, "CUDA's context, libraries and kernels")
    return (context,) if engine.enforce_eager else (context, graphs_row(facts, engine))


def graphs_row(facts: ModelFacts, engine: EngineConfig) -> MemoryRow:
    """The row of CUDA graphs and of the logits and scratch that they share: an estimate, because graphs come last."""
    sizes = graph_sizes(engine.max_num_seqs)
    shared = workspace_bytes(facts, sizes[-1]) + widened_bytes(facts, engine, sizes[-1])
    size = GRAPH_BYTES * len(sizes) + shared
    return MemoryRow("graphs", size, f"decode steps of {len(sizes)} sizes, 1 to {sizes[-1]}")


def _workspace_note(facts: ModelFacts, max_num_seqs: int) -> str:
    width = f"{facts.head_part} of {facts.vocab_size}" if facts.head_part else str(facts.vocab_size)
    if facts.pooling is not None and facts.pooling.encoder:
        return "an encoder has no logits"
    if not (facts.samples or facts.head_part):
        return "another stage has the logits"
    logits = f"logits of {max_num_seqs} sequences over {width} tokens"
    return f"{logits}, and the sampler" if facts.samples else logits


def _remedy(facts: ModelFacts, engine: EngineConfig, available: int, fixed: tuple[MemoryRow, ...]) -> str:
    """The message of DoesNotFit: the sizes, and one setting to change, the least harmful of those that make it fit. If
    the `fixed` rows were measured, they are assumed to exceed the computed ones by as much with other settings."""
    one = pool_bytes(facts, engine, tokens_of_one_sequence(facts, engine))
    need = sum(row.bytes for row in fixed) + one
    parts = ", ".join(f"{row.name} {format_bytes(row.bytes)}" for row in fixed)
    what = (
        f"the model does not fit: {parts} and a KV cache of {format_bytes(one)} for one sequence of "
        f"{engine.max_model_len} tokens need {format_bytes(need)}, and {format_bytes(available)} are available"
    )
    computed = available - (need - _need(facts, engine))
    for setting, least in (
        ("max_model_len", 1024),
        ("max_num_batched_tokens", max(32, engine.max_num_seqs)),  # each decodes one
        ("max_num_seqs", 1),
        ("max_model_len", 1),
    ):
        value = _largest(facts, engine, setting, least, computed)
        if value is not None:
            return f"{what}; set --{setting.replace('_', '-')} {value} or less"
    if engine.device == "cuda" and need <= available / engine.gpu_memory_utilization * ADVISED_UTILIZATION:
        return f"{what}; set --gpu-memory-utilization {ADVISED_UTILIZATION}"
    if engine.dtype == "float32" and _need(facts, replace(engine, dtype="bfloat16")) <= computed:
        return f"{what}; set --dtype bfloat16"
    schemes: tuple[Literal["int8", "int4"], ...] = ("int8", "int4") if engine.quantization != "int4" else ()
    for quantization in schemes:
        if _need(facts, replace(engine, quantization=quantization)) <= computed:
            return f"{what}; set --quantization {quantization}"
    smallest = replace(engine, **{name: min(getattr(engine, name), value) for name, value in SMALLEST.items()})
    flags = ", ".join(f"--{name.replace('_', '-')} {getattr(smallest, name)}" for name in SMALLEST)
    least = _need(facts, smallest)
    if least <= computed:
        return f"{what}; no single setting makes it fit, but these together do: {flags}"
    return (
        f"{what}; no single setting makes it fit: use a smaller model, or a machine with more memory: it needs "
        f"{format_bytes(least + available - computed)} even with {flags}"
    )


def _need(facts: ModelFacts, engine: EngineConfig) -> int:
    """The least bytes with which one sequence of max_model_len runs."""
    return fixed_bytes(facts, engine) + pool_bytes(facts, engine, tokens_of_one_sequence(facts, engine))


def _largest(facts: ModelFacts, engine: EngineConfig, setting: str, least: int, available: int) -> int | None:
    """The largest value of a setting that fits, at least `least` and below the present one; None if there is none."""
    low, high = least - 1, getattr(engine, setting) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _need(facts, _with(engine, setting, middle)) <= available:
            low = middle
        else:
            high = middle - 1
    return low if least <= low < getattr(engine, setting) else None


def _with(engine: EngineConfig, setting: str, value: int) -> EngineConfig:
    """The engine with another value of a setting. If a step has one token per sequence, it shrinks with
    max_num_seqs."""
    changes = {setting: value}
    if setting == "max_num_seqs" and engine.max_num_batched_tokens == engine.max_num_seqs:
        changes["max_num_batched_tokens"] = value
    return replace(engine, **changes)


def _round_up(tokens: int, engine: EngineConfig) -> int:
    return -(-tokens // engine.block_size) * engine.block_size


def _mebibytes(count: int, *, up: bool = False) -> str:
    return f"{(-(-count >> 20)) if up else (count >> 20)}MiB"
