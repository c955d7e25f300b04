"""FlashInfer itself, where it is installed: what the other tests assume of it, and on a GPU what it computes."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.kernels.attention import ReferenceAttention, attention_inputs, run_attention
from penstock.kernels.flashinfer import HEAD_DIMS, FlashInferAttention
from penstock.kernels.ops import PAGED_ATTENTION
from tests.checkpoints import VARIANTS, tiny_model, write_tiny_checkpoint
from tests.gpu.test_fidelity import needs_gpu, request_for, runner_of, serve
from tests.kernels import flashinfer_library
from tests.kernels.triton.device import there
from tests.models.logits import expected_logits, make_prompts

flashinfer = pytest.importorskip("flashinfer", exc_type=ImportError)
NAME = flashinfer_library.BatchPrefillWithPagedKVCacheWrapper.__name__


@pytest.mark.parametrize("method", ["__init__", "plan"])
def test_the_stand_in_takes_what_the_library_takes(method: str) -> None:
    """The arguments that Penstock gives are where, and what, they were: the first nine, and some by their names."""
    of = (getattr(getattr(module, NAME), method) for module in (flashinfer_library, flashinfer))
    own, real = (inspect.signature(each).parameters for each in of)
    assert list(real)[:9] == list(own)[:9]
    for name in own.keys() & {"kv_layout", "causal", "sm_scale", "window_left", "q_data_type", "kv_data_type"}:
        assert real[name].default == own[name].default, name


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_it_agrees_with_the_reference(head_dim: int, dtype: torch.dtype) -> None:
    from penstock.kernels.triton.attention import TritonAttention

    attention = FlashInferAttention(TritonAttention(), getattr(flashinfer, NAME))
    for arguments in attention_inputs(dtype, 0, head_dim):
        if arguments[5] or arguments[6] is not None:  # bounded scores and sinks: see Needs.plain_scores
            continue
        want = run_attention(ReferenceAttention(), arguments)
        got = run_attention(attention, there(arguments)).cpu()
        largest = want.abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=0.0, atol=PAGED_ATTENTION.tolerance[dtype] * max(largest, 1.0))


@needs_gpu
@pytest.mark.parametrize("variant", ["qwen3", "gemma3"])
def test_tokens_of_a_mixed_batch(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two plans ahead, with heads that it takes: each token is as likely as the best, or nearly, by transformers."""
    kind, sizes = VARIANTS[variant]
    monkeypatch.setitem(VARIANTS, "wide", (kind, {**sizes, "head_dim": 64}))
    folder = write_tiny_checkpoint("wide", tmp_path, dtype="bfloat16")
    prompts, model = make_prompts(seed=1), tiny_model("wide").to(torch.bfloat16).float()
    runner = runner_of(folder, "bfloat16", attention_backend="flashinfer")
    tokens = serve(runner, [request_for(str(i), prompt, 32) for i, prompt in enumerate(prompts)], budget=45)
    assert_likely(lambda ids: expected_logits(model, ids), prompts, tokens)


def assert_likely(
    logits_of: Callable[[list[int]], torch.Tensor], prompts: list[list[int]], tokens: dict[str, list[int]]
) -> None:
    for i, prompt in enumerate(prompts):
        output = tokens[str(i)]
        logits = logits_of([*prompt, *output])[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        best, least = logits.amax(1), logits.amin(1)
        assert ((best - chosen) <= 0.05 * (best - least)).all() and len(output) == 32
