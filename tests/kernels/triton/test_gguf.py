"""A GGUF file loaded as the engine loads it on a GPU, with the Triton kernels."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.config import EngineConfig
from penstock.config.weights import weights_bytes
from penstock.families import load_spec, model_facts
from penstock.kernels import detect_platform, packers
from penstock.runtime.loading import gpu as load_device
from tests.kernels.triton.test_load import likeliest, loaded

pytest.importorskip("gguf", reason="makes the file")
from tests import gguf_models
from tests.gguf.blocks import HALVES
from tests.gguf.blocks import random_rows as rows_of_any_scale
from tests.weights.gguf_values import write_model

# As in a Q4_K_M file, whose types have halves and bytes, groups of 32 and 16, and minima; and a table.
MIXED = dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), "Q4_K")
MIXED |= {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_output": "IQ4_XS", "token_embd.weight": "Q6_K"}
SCALES = {"Q4_K": (1e-3, 7.5e-3), "Q6_K": (1e-4,), "IQ4_XS": (1e-4,)}  # values are then below 1


def moderate_rows(dtype: str, rows: int, k: int, *, seed: int = 0) -> NDArray[np.uint8]:
    """Random rows of moderate scales."""
    data = rows_of_any_scale(dtype, rows, k, seed=seed)
    blocks = data.reshape(rows * k // 256, -1)
    for place, scale in zip(HALVES.get(dtype, (0,)), SCALES[dtype], strict=True):
        blocks[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return data


@pytest.mark.skipif(not detect_platform().isa, reason="no native kernels for this machine")
def test_a_gguf_file_stays_codes_and_says_what_it_says_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_models, "random_rows", moderate_rows)
    path = write_model(tmp_path, "llama", MIXED, tie_word_embeddings=True, num_hidden_layers=1, intermediate_size=256)
    settings = EngineConfig(
        model=str(path),
        name="tiny",
        device="cuda",
        depth=2,
        dtype="bfloat16",
        max_model_len=16,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        kv_cache_bytes=1 << 20,
        enforce_eager=True,
    )
    facts, prompt, said = model_facts(load_spec(path)), (11, 300, 7, 150, 42, 3), []
    for kept in (facts, facts.without_codes()):
        if kept is not facts:  # as on a machine that has no native code to decode them
            for module in (packers, load_device):
                monkeypatch.setattr(module, "instruction_sets", lambda: ())
        runner = loaded(settings, monkeypatch)
        assert runner.model.nbytes == weights_bytes(kept, settings)
        said.append(likeliest(runner, prompt))
        runner.close()
    assert len(said[0] & said[1]) >= 4, said
    assert weights_bytes(facts, settings) < 0.42 * weights_bytes(facts.without_codes(), settings)
