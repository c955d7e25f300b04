"""Checkpoints that also take images, video or sound: only their language models are loaded."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from penstock.families.decoders.gemma3 import gemma3
from penstock.families.decoders.gemma4 import gemma4
from penstock.families.decoders.hybrids.qwen3_next import qwen3_5, qwen3_5_moe
from penstock.families.decoders.mixtures.llama4 import llama4
from penstock.families.hf_config import HFConfig, text_config
from penstock.families.llama_like import NAMES
from penstock.families.spec import ModelSpec


def _language_model(family: Callable[..., ModelSpec], *ignored: str, **naming: Any) -> Callable[[HFConfig], ModelSpec]:
    """Returns the function from a config.json to the spec of its language model.

    `family` makes the spec from the `text_config`, with the arguments `naming`: how this checkpoint names its tensors.
    Tensors that match a pattern of `ignored` (fnmatch) are not loaded.
    """

    def spec_of(config: HFConfig) -> ModelSpec:
        spec = family(text_config(config), **naming)
        return replace(spec, ignored_tensors=(*spec.ignored_tensors, *ignored))

    return spec_of


_INSIDE = "model.language_model."
_NAMES = replace(NAMES, embedding=f"{_INSIDE}embed_tokens", layers=f"{_INSIDE}layers.", norm=f"{_INSIDE}norm")
_GEMMA_4 = ("model.vision_tower.*", "model.audio_tower.*", "model.embed_vision.*", "model.embed_audio.*")
_PROJECTOR, _PREFIX = "multi_modal_projector.*", "language_model."

llama4_language = _language_model(llama4, "vision_model.*", _PROJECTOR, prefix=_PREFIX)
gemma3_language = _language_model(gemma3, "vision_tower.*", _PROJECTOR, prefix=_PREFIX)
gemma4_language = _language_model(gemma4, *_GEMMA_4, names=_NAMES)
qwen3_5_language = _language_model(qwen3_5, "model.visual.*", names=_NAMES)
qwen3_5_moe_language = _language_model(qwen3_5_moe, "model.visual.*", names=_NAMES)
