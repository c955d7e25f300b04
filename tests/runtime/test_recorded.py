"""A recorded step gives the bits of an eager one."""

from collections import Counter
from collections.abc import Callable
from ctypes import c_int64
from pathlib import Path

import pytest
import torch

from penstock.kernels.native.loader import instruction_sets
from penstock.kernels.native.norm import NativeNorm
from penstock.kernels.native.session import Session
from penstock.kernels.native.structs import LinearOp
from penstock.kernels.native.team import ThreadTeam
from penstock.messages import GenerateRequest, NewSequence, SamplingParams, StepPlan, Work
from tests.models.serving import Server, make_runner
from tests.weights.gguf_values import write_model

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.skipif(not instruction_sets(), reason="no native kernels for this machine")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["qwen3", "gemma3", "gemma4_shared", "qwen3_bias", "qwen2_moe", "mixtral"])
def test_a_recorded_step_is_an_eager_one(variant: str, dtype: str, tiny_checkpoint: Checkpoint) -> None:
    sampling = SamplingParams(seed=0, max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    requests = [
        GenerateRequest(request_id=str(n), prompt_ids=tuple(range(7, 7 + n)), sampling=sampling) for n in (1, 9, 30, 64)
    ]
    runs = [
        [
            (delta.request_id, delta.token_ids, delta.prompt_logprobs)
            for delta in Server(make_runner(tiny_checkpoint(variant), dtype=dtype, recorded=recorded), budget=40).run(
                requests
            )
        ]
        for recorded in (True, False)
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_the_last_layer_is_finished_only_for_tokens_that_are_sampled_after(
    variant: str, tiny_checkpoint: Checkpoint
) -> None:
    """A chunk inside a prompt does not need it; the end of a prompt needs it for one token."""
    runner = make_runner(tiny_checkpoint(variant))
    layers, groups = len(runner.pages.layers), len(runner.capacity.groups)
    tables = tuple(tuple(range(1, 9)) for _ in range(groups))
    sampling = SamplingParams(seed=0, max_tokens=4, temperature=0.0)
    prompt = NewSequence(1, tuple(range(7, 37)), 30, 0, tables, sampling, 0)
    plans = [StepPlan(1, (Work(1, 20, False),), (prompt,)), StepPlan(2, (Work(1, 10, True),))]
    for plan, finished in zip(plans, (0, 1), strict=True):
        with runner.profile() as timed:
            runner.execute(plan)
        products = Counter(each.label for each in timed if isinstance(each.op, LinearOp))
        assert products["qkv"] == layers
        assert products["output"] == products["gate_up"] == products["down"] == layers - 1 + finished
        assert products["head"] == finished
        cells = [each.op.rows for each in timed if isinstance(each.op, LinearOp)]
        assert len(set(cells)) == 1 + finished and cells.count(cells[-1]) == (4 if finished else len(cells))


def test_a_product_of_several_formats_is_several_ops_of_one_label(tmp_path: Path) -> None:
    """q and k have one type, v another: these are two ops a layer. A recorded step is an eager one."""
    path = write_model(tmp_path, "qwen3", {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K"})
    runner = make_runner(path, packed=True)
    sampling = SamplingParams(seed=0, max_tokens=4, temperature=0.0)
    prompt = NewSequence(1, tuple(range(7, 37)), 30, 0, (tuple(range(1, 9)),), sampling, 0)
    with runner.profile() as timed:
        runner.execute(StepPlan(1, (Work(1, 30, True),), (prompt,)))
    products = Counter(each.label for each in timed if isinstance(each.op, LinearOp))
    assert products == {"qkv": 4, "output": 2, "gate_up": 2, "down": 2, "head": 1}
    sampling = SamplingParams(seed=0, max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=5)
    requests = [
        GenerateRequest(request_id=str(n), prompt_ids=tuple(range(7, 7 + n)), sampling=sampling) for n in (1, 30)
    ]
    eager = make_runner(path, packed=True, recorded=False)
    runs = [
        [(delta.request_id, delta.token_ids, delta.logprobs) for delta in Server(each, budget=40).run(requests)]
        for each in (make_runner(path, packed=True), eager)
    ]
    assert runs[0] == runs[1]


def test_a_program_uses_memory_again_that_no_tensor_needs_any_more() -> None:
    session = Session(ThreadTeam(instruction_sets()[0], 1))
    norm, weight = NativeNorm(session), torch.ones(64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = x
    with session.record() as program:
        rows = c_int64(5)
        result = program.input(x, rows)
        for _ in range(40):
            result = norm(result, None, weight, 1e-6, 0.0)[0]
        held = norm(result, None, weight, 1e-6, 0.0)[0]  # a tensor somebody holds is not given to another
        for _ in range(10):
            result = norm(result, None, weight, 1e-6, 0.0)[0]
    assert len(program) == 51 and program.buffers <= 4
    program.run()
    for _ in range(40):
        expected = norm(expected, None, weight, 1e-6, 0.0)[0]
    assert torch.equal(held, norm(expected, None, weight, 1e-6, 0.0)[0])
    rows.value, before = 2, result.clone()
    x.mul_(2.0)
    x[1].neg_()
    program.run()
    torch.testing.assert_close(result[1], -before[1], rtol=0.0, atol=1e-5)
    assert torch.equal(result[2:], before[2:])  # rows beyond the count are left alone


def test_python_is_called_between_the_ops_it_was_recorded_between() -> None:
    """On the rows that count; and the memory of a tensor it was given is used again all the same."""
    session = Session(ThreadTeam(instruction_sets()[0], 1))
    norm, weight = NativeNorm(session), torch.linspace(0.5, 2.0, 64)
    seen: list[int] = []

    def shift(x: torch.Tensor) -> None:
        seen.append(len(x))
        x.add_(torch.arange(64.0))

    def layers(x: torch.Tensor) -> torch.Tensor:
        session.call(shift, x)
        for _ in range(8):
            x = norm(x, None, weight, 1e-6, 0.0)[0]
            session.call(shift, x)
        return norm(x, None, weight, 1e-6, 0.0)[0]

    drawn = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    x, rows = drawn.clone(), c_int64()
    with session.record() as program:
        result = layers(program.input(x, rows))
    assert len(program) == 9 and program.buffers <= 3 and not seen
    for count, run in ((5, program.run), (2, program.run), (3, lambda: program.timed(program.profile()))):
        rows.value = count
        x.copy_(drawn)
        run()
        assert seen == [count] * 9
        assert torch.equal(result[:count], layers(drawn[:count].clone()))
        seen.clear()
