"""Logits of a tiny model after every token: ours, computed in chunks on scattered pages, and transformers'."""

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.families import ModelSpec, load_spec
from penstock.kernels import Kernels, Needs, Platform, select_kernels
from penstock.kernels.batch_arrays import StepArrays, order_units
from penstock.messages import NewSequence, SamplingParams
from penstock.models import AttentionKinds, Decoder, GroupInput, StepInput
from penstock.models.attention import ATTENTION_KINDS
from penstock.runtime.batch import ResidentBatch
from penstock.runtime.pages import KVPages
from penstock.runtime.step_kernels import ReferenceStep
from penstock.runtime.units import attention_batch, units_of
from penstock.weights.load import load_parameters
from tests.checkpoints import tiny_model
from tests.kernels.triton.device import there
from tests.models.serving import HERE

LENGTHS = (1, 3, 7, 16, 17, 30, 41, 50)  # with 64 more, all but a few pass the window of 16
VOCAB = 307
BLOCK_SIZE = 16
CONTEXT = 256  # as tests/models/serving.py has it
# fp32's own error, of logits around 10: beside transformers, a log-probability may differ by this much of its size and
FP32_RTOL, FP32_ATOL = 4e-6, 1e-5
# and the distance to the model in double precision, over all tokens, by this much of transformers'.
FP32_BOUND = 1.5
# In bf16 both are wrong: the distance to the fp32 model may be a quarter larger than that of transformers in bf16.
BF16_BOUND = 1.25

Checkpoint = Callable[..., Path]


def make_prompts(seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def kernels_on(platform: Platform, spec: ModelSpec, dtype: torch.dtype = torch.float32) -> Kernels:
    return select_kernels(platform, Needs(dtype, BLOCK_SIZE, spec.head_dims))


@torch.no_grad()
def expected_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    return model(torch.tensor([tokens])).logits[0].float()


class InDouble(TorchFunctionMode):
    """Computes in double precision what a model's code asks to be computed in single precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        kwargs = {name: torch.float64 if each is torch.float32 else each for name, each in (kwargs or {}).items()}
        return func(*args, **kwargs)


@torch.no_grad()
def exact_logits(model: Any, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The logits of a transformers model in fp32, computed in double precision with the same weights."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the others multiply in single precision only
    torch.set_default_dtype(torch.float64)
    try:
        with InDouble():
            logits = [exact(torch.tensor([prompt])).logits[0] for prompt in prompts]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(each.dtype == torch.float64 for each in logits)
    return logits


def assert_near_in_fp32(got: Tensor, *wanted: Tensor) -> None:
    """Each log-probability is that of one of `wanted`, up to fp32's own error."""
    ours, theirs = got.double().log_softmax(-1), torch.stack([want.double().log_softmax(-1) for want in wanted])
    nearest = theirs.gather(0, (theirs - ours).abs().argmin(0, keepdim=True))[0]
    torch.testing.assert_close(ours, nearest, rtol=FP32_RTOL, atol=FP32_ATOL)


def distance(got: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The root mean square of what log-probabilities differ by."""
    found, right = torch.cat(list(got)).double().log_softmax(-1), torch.cat(list(exact)).log_softmax(-1)
    return (found - right).pow(2).mean().sqrt().item()


@torch.inference_mode()
def logits_of(
    spec: ModelSpec,
    parameters: Mapping[str, Any],
    kernels: Kernels,
    prompts: Sequence[Sequence[int]],
    *,
    chunk: int = 64,
    dtype: torch.dtype = torch.float32,
    device: torch.device = HERE,
    kinds: AttentionKinds = ATTENTION_KINDS,
    context: int = CONTEXT,
    make: Callable[..., Any] = Decoder,
) -> list[Tensor]:
    """Computed on the device in steps of at most `chunk` tokens of each prompt, all side by side. `make` makes the
    decoder. A tensor rank other than the first gets no logits."""
    held = {name: there(value, device) for name, value in parameters.items()}
    decoder = make(spec, held, kernels, kinds=kinds, context=context)
    each, groups = -(-max(map(len, prompts)) // BLOCK_SIZE), len(spec.windows)
    pages = KVPages(spec, [1 + len(prompts) * each] * groups, BLOCK_SIZE, dtype, device=device, rows=len(prompts))
    batch = ResidentBatch(len(prompts), each * BLOCK_SIZE, BLOCK_SIZE, groups, HERE, shared=True)
    arrays = StepArrays.empty(len(prompts), len(prompts), sum(map(len, prompts)), groups, HERE)
    ids = [np.random.default_rng(group).permutation(len(prompts) * each) + 1 for group in range(groups)]
    for i, prompt in enumerate(prompts):
        tables = tuple(tuple(names[i * each : (i + 1) * each].tolist()) for names in ids)
        sampling = SamplingParams(seed=0, max_tokens=1)
        batch.add(NewSequence(i, tuple(prompt), len(prompt), 0, tables, sampling, 0))
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while left := [i for i, prompt in enumerate(prompts) if batch.num_computed[batch.occupant(i).row] < len(prompt)]:
        rows = [batch.occupant(i).row for i in left]
        counts = [min(chunk, len(prompts[i]) - int(batch.num_computed[row])) for i, row in zip(left, rows, strict=True)]
        units = units_of(batch, rows, counts, [False] * len(rows), [0] * len(rows))
        nothing = np.zeros_like(units.rows)
        described, _ = order_units(units.length, units.offset[:-1], nothing, units.rows, nothing - 1, nothing)
        arrays.units[:, : len(rows)] = torch.from_numpy(described)
        ReferenceStep().fill(batch.state, arrays, len(rows), BLOCK_SIZE)
        count = units.tokens
        seen = [attention_batch(group, window, batch, units) for group, window in enumerate(spec.windows)]
        inputs = [
            GroupInput(kernels.attention.prepare(each, pages.group_keys(group)), blocks, arrays.offsets[:count])
            for group, (each, blocks) in enumerate(zip(seen, arrays.blocks[:, :count], strict=True))
        ]
        inputs.append(GroupInput(arrays.units[:, : len(rows)].T, arrays.offsets, arrays.offsets))
        step = StepInput(arrays.token_ids[:count], arrays.positions[:count], tuple(inputs))
        computed = decoder.logits(decoder.forward(there(step, device), pages.layers))
        if computed is not None:
            for i, part in zip(left, computed.cpu().split(counts), strict=True):
                logits[i].append(part)
        batch.num_computed[rows] += counts
        batch.state.computed[rows] += torch.tensor(counts, dtype=torch.int32)
    return [torch.cat(parts) for parts in logits if parts]


def assert_near_in_bf16(
    variant: str, checkpoint: Checkpoint, platform: Platform, *, device: torch.device = HERE
) -> None:
    """Our logits in bf16 are as near to the fp32 model as those of transformers in bf16, or nearly."""
    folder, prompts = checkpoint(variant, dtype="bfloat16"), make_prompts()
    spec = load_spec(folder)
    exact, rounded = tiny_model(variant), tiny_model(variant).to(torch.bfloat16)
    exact.load_state_dict(rounded.state_dict())  # the same weights, so that the distance is that of the arithmetic
    parameters = load_parameters(folder, spec, torch.bfloat16, progress=False)
    kernels = kernels_on(platform, spec, torch.bfloat16)
    got = logits_of(spec, parameters, kernels, prompts, dtype=torch.bfloat16, device=device)
    ours, theirs = [], []
    for prompt, logits in zip(prompts, got, strict=True):
        want = expected_logits(exact, prompt)
        ours.append(logits - want)
        theirs.append(expected_logits(rounded, prompt) - want)
    distance, allowed = (_size(torch.cat(parts), spec) for parts in (ours, theirs))
    assert 0 < distance <= BF16_BOUND * allowed


def _size(differences: Tensor, spec: ModelSpec) -> float:
    """The root mean square of all differences [tokens, vocabulary]. With experts the median of the tokens' ones:
    rounding may choose another expert for a token, which moves it several times as far as all others."""
    of_tokens = differences.pow(2).mean(-1).sqrt()
    experts = any(layer.moe is not None for layer in spec.layers)
    return (of_tokens.median() if experts else of_tokens.pow(2).mean().sqrt()).item()
