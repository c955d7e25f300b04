"""Greedy tokens of a GGUF file are those of a checkpoint that has the file's values as fp32."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.families import load_spec
from penstock.kernels.native.loader import LOWER, instruction_sets
from penstock.messages import GenerateRequest, SamplingParams
from penstock.text import Tokenizer
from tests.invariance.test_batch_invariance import Machine
from tests.smollm2 import smollm2
from tests.weights.gguf_values import Values

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Water boils at a temperature of")
CONFIG = {  # of HuggingFaceTB/SmolLM2-135M-Instruct
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
    "eos_token_id": 2,
}


@pytest.fixture
def no_native_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(LOWER, "none")
    instruction_sets.cache_clear()
    yield
    monkeypatch.undo()
    instruction_sets.cache_clear()


def write_dense(folder: Path) -> Path:
    """The checkpoint that the file was made of, with the values of its codes."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec, values = load_spec(folder), Values(smollm2())
    tensors = {}
    for parameter in spec.parameters:
        whole = torch.from_numpy(values.of(parameter))
        tensors |= {s.name: whole[s.start : s.start + s.rows].clone() for s in parameter.sources}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.rare  # the values of the file's tensors are tested in tests/weights
@pytest.mark.usefixtures("no_native_kernels")
def test_tokens_are_those_of_the_dense_checkpoint(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2())
    wave = [
        GenerateRequest(
            request_id=str(i),
            prompt_ids=tuple(tokenizer.encode(prompt)),
            sampling=SamplingParams(seed=0, max_tokens=16, temperature=0.0, ignore_eos=True),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    expected = Machine(write_dense(tmp_path)).run([wave], seqs=4)
    assert all(len(set(tokens)) > 6 for tokens in expected.values())
    assert Machine(smollm2()).run([wave], seqs=4) == expected
