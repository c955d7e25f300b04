"""Every family's variants, and which of them run where."""

from tests.checkpoints.dense import DENSE
from tests.checkpoints.experts import EXPERTS_AND_LATENTS
from tests.checkpoints.sizes import Variants
from tests.checkpoints.states import WITH_STATES

VARIANTS: Variants = {**DENSE, **EXPERTS_AND_LATENTS, **WITH_STATES}
WITH_OFFSET = ("Gemma", "Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe")  # their norms store weight - 1
# Between them they have the attention, norms, positions, MLPs, experts, latents and states of all others.
TYPICAL = ("qwen3", "llama_yarn", "gemma2", "gemma3", "gemma4_shared", "phi3_long", "granite", "cohere2", "gpt2")
TYPICAL += ("gpt_neox", "falcon_grouped", "qwen2_moe", "gemma4_moe", "llama4_chunks", "gpt_oss", "deepseek_v3")
TYPICAL += ("mamba2", "nemotron_h_moe", "qwen3_next", "granite_4_hybrid")
STATES = tuple(WITH_STATES)  # on one CPU only
DIVISIBLE = tuple(name for name in VARIANTS if name not in STATES)
# On a GPU. Latents are refused there (config/checks/latents.py).
ON_GPUS = tuple(name for name in DIVISIBLE if not name.startswith("deepseek"))
