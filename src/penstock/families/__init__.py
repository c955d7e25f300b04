"""Models as data: one short file per family maps a Hugging Face configuration to a ModelSpec."""

from penstock.families.hf_config import UnsupportedModel
from penstock.families.registry import FAMILIES, load_generation_defaults, load_spec, model_facts, spec_from_config
from penstock.families.spec import LayerSpec, ModelSpec, Parameter, RopeSpec, TensorSource

__all__ = [
    "FAMILIES",
    "LayerSpec",
    "ModelSpec",
    "Parameter",
    "RopeSpec",
    "TensorSource",
    "UnsupportedModel",
    "load_generation_defaults",
    "load_spec",
    "model_facts",
    "spec_from_config",
]
