"""The wire of rerankers and classifiers: Cohere's and Jina's rerank, and vLLM's score and classify."""

from penstock.frontend.describe import Operation
from penstock.frontend.rerank import answers
from penstock.frontend.rerank.classify import ClassifyFields, classify
from penstock.frontend.rerank.errors import encode_error
from penstock.frontend.rerank.rerank import RerankFields, rerank, rerank_v2
from penstock.frontend.rerank.score import ScoreFields, score

_RANKED = {"query": "a river", "documents": ["a stream", "a desert"]}
OPERATIONS = {
    "rerank": Operation(
        summary="Order documents by a query, as Jina does", shape=answers.RANKED, request=RerankFields, example=_RANKED
    ),
    "rerank_v2": Operation(
        summary="Order documents by a query, as Cohere does",
        shape=answers.RANKED,
        request=RerankFields,
        example=_RANKED,
    ),
    "score": Operation(
        summary="Score pairs of texts",
        shape=answers.SCORES,
        request=ScoreFields,
        example={"text_1": "a river", "text_2": ["a stream"]},
    ),
    "classify": Operation(
        summary="Classify texts", shape=answers.CLASSES, request=ClassifyFields, example={"input": ["a river"]}
    ),
}
