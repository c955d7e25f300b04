"""A model layer by layer gives the logits of transformers."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.families import load_spec
from penstock.kernels import Needs, detect_platform, select_kernels, select_packing
from penstock.quantize.job import torch_kernels
from penstock.quantize.stream import LayerStream, batches, cannot_stream

VARIANTS = ("llama3", "qwen3", "gemma2", "mixtral", "gpt2", "cohere", "mistral_window", "phi3", "olmo2", "gpt_neox")
WINDOWS = [
    [(7 * i * i + 3 * start) % 299 for i in range(length)] for start, length in ((1, 40), (2, 17), (3, 64), (4, 1))
]


def logits_of(stream: LayerStream) -> torch.Tensor:
    with torch.inference_mode():
        hidden = stream.embed(WINDOWS)
        for index in range(len(stream.spec.layers)):
            stream.layer(index).forward(hidden, WINDOWS)
        return stream.head()(hidden)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_those_of_transformers(variant: str, tiny_checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(variant)
    spec = load_spec(folder)
    ours = logits_of(LayerStream(folder, spec, torch_kernels(spec), torch.float32))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        theirs = torch.cat([model(torch.tensor([window])).logits[0] for window in WINDOWS])
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_the_engine_s_kernels_give_nearly_the_same(tiny_checkpoint: Callable[..., Path]) -> None:
    folder = tiny_checkpoint("qwen3")
    spec, platform, needs = load_spec(folder), detect_platform(), Needs(torch.float32, 16, (16,))
    expected = logits_of(LayerStream(folder, spec, torch_kernels(spec), torch.float32))
    packing = select_packing(platform, needs)
    found = logits_of(LayerStream(folder, spec, select_kernels(platform, needs), torch.float32, packing))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_batches_have_whole_windows() -> None:
    windows = [[0] * 900] * 3 + [[0] * 3000, [0] * 5]
    assert [(rows.start, rows.stop, len(batch)) for rows, batch in batches(windows)] == [
        (0, 1800, 2),
        (1800, 2700, 1),
        (2700, 5700, 1),
        (5700, 5705, 1),
    ]


def test_models_that_are_not_executed_layer_by_layer_say_why(tiny_checkpoint: Callable[..., Path]) -> None:
    assert "states" in str(cannot_stream(load_spec(tiny_checkpoint("granite_4_hybrid"))))
    assert cannot_stream(load_spec(tiny_checkpoint("qwen3"))) is None
