"""Models: the blocks that execute a ModelSpec."""

from penstock.models.decoder import Decoder, GroupInput, LayerCache, StepInput

__all__ = ["Decoder", "GroupInput", "LayerCache", "StepInput"]
