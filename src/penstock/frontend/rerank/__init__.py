"""The wire of rerankers and classifiers: Cohere's and Jina's rerank, and vLLM's score and classify."""

from penstock.frontend.rerank.classify import classify
from penstock.frontend.rerank.errors import encode_error
from penstock.frontend.rerank.rerank import rerank, rerank_v2
from penstock.frontend.rerank.score import score

__all__ = ["classify", "encode_error", "rerank", "rerank_v2", "score"]
