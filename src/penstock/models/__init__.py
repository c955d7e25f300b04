"""Executes the model that a ModelSpec describes."""

from penstock.models.attention import Attention, AttentionKinds, GroupInput, LayerCache
from penstock.models.collectives import Collectives
from penstock.models.decoder import Decoder, Hidden, LanguageModel, StepInput
from penstock.models.parameters import LayerParameters
from penstock.models.product import Product
