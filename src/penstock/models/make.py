"""Makes the model that executes the ModelSpec of a decoder."""

from collections.abc import MutableMapping
from typing import Any

from penstock.families import ModelSpec
from penstock.kernels import Kernels
from penstock.models.collectives import Collectives
from penstock.models.decoder import Decoder, LanguageModel


def make_decoder(
    spec: ModelSpec,
    parameters: MutableMapping[str, Any],
    kernels: Kernels,
    collectives: Collectives | None = None,
    *,
    context: int = 0,
) -> LanguageModel:
    """Returns our decoder, or transformers' with our attention if the spec says so. The arguments are as for Decoder.
    Raises what TransformersDecoder raises."""
    if spec.transformers is None:
        return Decoder(spec, parameters, kernels, collectives, context=context)
    from penstock.models.transformers_decoder import TransformersDecoder  # transformers is optional

    return TransformersDecoder(spec, parameters, kernels)
