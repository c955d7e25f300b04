"""Of a checkpoint that also takes images, the language model gives transformers' logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.families import load_spec
from penstock.kernels import detect_platform
from penstock.weights.load import load_parameters
from tests.checkpoints import END, SIZES, VARIANTS, WITH_OFFSET, randomise
from tests.models.logits import expected_logits, kernels_on, logits_of, make_prompts

_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_QWEN_VISION = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {**_SMALL, "image_size": 28, "patch_size": 14},
    "gemma4_moe": {**_SMALL, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 16},
    "llama4": {
        **_SMALL,
        "image_size": 28,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
    },
    "qwen3_5": {**_QWEN_VISION},
    "qwen3_5_moe": {**_QWEN_VISION},
}


@pytest.mark.parametrize("variant", VISION)
def test_logits_in_fp32(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    text = {**SIZES, **changes, "tie_word_embeddings": False, "pad_token_id": END}
    config = getattr(transformers, f"{family}Config")(
        text_config=text, vision_config=VISION[variant], tie_word_embeddings=False
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    randomise(model, seed=0, norm_mean=0.0 if family in WITH_OFFSET else 1.0)
    model.save_pretrained(tmp_path)

    # In transformers 5.24, the whole model of Llama 4 fails without an image.
    judge = model.language_model if family == "Llama4" else model
    spec, prompts = load_spec(tmp_path), make_prompts()
    parameters = load_parameters(tmp_path, spec, torch.float32, progress=False)
    logits = logits_of(spec, parameters, kernels_on(detect_platform(), spec), prompts)
    for prompt, got in zip(prompts, logits, strict=True):
        ours, theirs = got.log_softmax(-1), expected_logits(judge, prompt).log_softmax(-1)
        torch.testing.assert_close(ours, theirs, rtol=4e-6, atol=1e-5)
