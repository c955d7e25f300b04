"""LongRoPE's long set of frequencies: all prompts of a model that is served with more tokens than its original context
get it, the short ones too. transformers chooses by the length of each prompt."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.families import load_spec
from penstock.kernels import detect_platform
from penstock.messages import GenerateRequest, SamplingParams
from penstock.weights.load import load_parameters
from tests.checkpoints import write_tiny_checkpoint
from tests.models.logits import CONTEXT, VOCAB, expected_logits, kernels_on, logits_of
from tests.models.serving import Server, make_runner, outputs

ORIGINAL = 24
LENGTHS = (3, 16, ORIGINAL, ORIGINAL + 1, 41, 90)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_checkpoint("phi3_long", tmp_path_factory.mktemp("phi3") / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["original_max_position_embeddings"] = ORIGINAL
    config["rope_parameters"]["original_max_position_embeddings"] = ORIGINAL
    path.write_text(json.dumps(config))
    return folder


def transformers_model(folder: Path, *, always_long: bool = False) -> Any:
    from transformers import Phi3ForCausalLM

    model = Phi3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if always_long:
        rotary = model.model.rotary_emb
        rotary(torch.zeros(1), torch.tensor([[ORIGINAL]]))  # a long prompt
        rotary.original_inv_freq = rotary.inv_freq.clone()
    return model


def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]


def ours(folder: Path, chunk: int, context: int = CONTEXT) -> list[Tensor]:
    spec = load_spec(folder)
    parameters = load_parameters(folder, spec, torch.float32, progress=False)
    kernels = kernels_on(detect_platform(), spec)
    found = logits_of(spec, parameters, kernels, prompts(), chunk=chunk, context=context)
    return [logits.log_softmax(-1) for logits in found]


def theirs(model: Any) -> list[Tensor]:
    return [expected_logits(model, prompt).log_softmax(-1) for prompt in prompts()]


@pytest.mark.parametrize("chunk", [128, 7])
def test_prompts_beyond_the_original_context_are_those_of_transformers(folder: Path, chunk: int) -> None:
    each = list(zip(ours(folder, chunk), theirs(transformers_model(folder)), LENGTHS, strict=True))
    for got, expected, length in each:
        if length > ORIGINAL:
            torch.testing.assert_close(got, expected, rtol=4e-6, atol=1e-5)
        else:  # here transformers has the short set
            assert (got - expected).abs().max() > 1e-2


@pytest.mark.parametrize("chunk", [128, 7])
def test_shorter_prompts_have_the_long_set_too(folder: Path, chunk: int) -> None:
    for got, expected in zip(ours(folder, chunk), theirs(transformers_model(folder, always_long=True)), strict=True):
        torch.testing.assert_close(got, expected, rtol=4e-6, atol=1e-5)


def test_a_shorter_context_has_the_short_set(folder: Path) -> None:
    for got, expected, length in zip(
        ours(folder, 128, context=ORIGINAL), theirs(transformers_model(folder)), LENGTHS, strict=True
    ):
        if length <= ORIGINAL:
            torch.testing.assert_close(got, expected, rtol=4e-6, atol=1e-5)


def test_greedy_tokens_of_a_mixed_batch(folder: Path) -> None:
    """Prompts on both sides of the original context. With their outputs all are beyond it."""
    model, sampling = (
        transformers_model(folder),
        SamplingParams(seed=0, max_tokens=64, temperature=0.0, ignore_eos=True),
    )
    requests = [
        GenerateRequest(request_id=str(i), prompt_ids=tuple(prompt), sampling=sampling)
        for i, prompt in enumerate(prompts())
    ]
    tokens = outputs(Server(make_runner(folder), budget=45).run(requests))
    for i, prompt in enumerate(prompts()):
        output = tokens[str(i), 0]
        best = expected_logits(model, [*prompt, *output])[len(prompt) - 1 : -1].argmax(-1)
        assert output == best.tolist() and len(set(output)) > 16
