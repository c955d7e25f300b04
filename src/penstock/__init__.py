"""Penstock: an LLM inference server, and a library. docs/architecture.md describes its packages."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.api import (
        LLM,
        AsyncLLM,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        SamplingParams,
        ScoringRequestOutput,
        StructuredOutputsParams,
    )

from penstock.version import __version__ as __version__

__all__ = [
    "LLM",
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    """Imports the library when a name of it is used: the commands do not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    import penstock.api as api

    return getattr(api, name)
