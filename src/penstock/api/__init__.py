"""Penstock as a library: `LLM` and `AsyncLLM` run an engine in this process, without HTTP."""

from penstock.api.async_llm import AsyncLLM
from penstock.api.llm import LLM
from penstock.api.outputs import (
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestOutput,
    ScoringRequestOutput,
)
from penstock.api.params import SamplingParams, StructuredOutputsParams

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
