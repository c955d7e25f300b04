"""Models: the blocks that execute a ModelSpec."""

from penstock.models.collectives import Collectives
from penstock.models.decoder import Decoder, GroupInput, Hidden, LayerCache, StepInput

__all__ = ["Collectives", "Decoder", "GroupInput", "Hidden", "LayerCache", "StepInput"]
