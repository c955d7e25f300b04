"""The wire of rerankers and classifiers: Cohere's and Jina's rerank, and vLLM's score and classify."""

from penstock.frontend.describe import Operation
from penstock.frontend.rerank.classify import ClassifyFields, classify
from penstock.frontend.rerank.errors import encode_error
from penstock.frontend.rerank.rerank import RerankFields, rerank, rerank_v2
from penstock.frontend.rerank.score import ScoreFields, score

OPERATIONS = {
    "rerank": Operation(summary="Order documents by a query", request=RerankFields),
    "rerank_v2": Operation(summary="Order documents by a query", request=RerankFields),
    "score": Operation(summary="Score pairs of texts", request=ScoreFields),
    "classify": Operation(summary="Label texts", request=ClassifyFields),
}

__all__ = ["OPERATIONS", "classify", "encode_error", "rerank", "rerank_v2", "score"]
