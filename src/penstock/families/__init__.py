"""Models as data: one short file per family maps a Hugging Face configuration to a ModelSpec."""

from penstock.families.hf_config import UnsupportedModel
from penstock.families.kinds.attention import AttentionSpec, GroupedQuerySpec, RopeSpec
from penstock.families.kinds.latent import LatentSpec
from penstock.families.kinds.states import RecurrentSpec
from penstock.families.registry import (
    FAMILIES,
    load_end_tokens,
    load_generation_defaults,
    load_spec,
    model_facts,
    spec_from_config,
)
from penstock.families.shard import CannotSplit, check_split, rank_facts, shard
from penstock.families.spec import LayerSpec, ModelSpec, MoESpec, Parameter, TensorSource
