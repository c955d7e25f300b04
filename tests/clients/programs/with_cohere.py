"""The `cohere` package, whatever its version: reranking with both of its clients, and errors.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import cohere
from arguments import EMBEDDER, EMBEDDER_SERVER, EMBEDDINGS, TEXTS

# The embeddings have length 1: these are their cosines with the first one.
COSINES = [sum(a * b for a, b in zip(EMBEDDINGS[0], row, strict=True)) for row in EMBEDDINGS[1:]]
ORDER = sorted(range(len(COSINES)), key=lambda index: -COSINES[index])

for client in (
    cohere.ClientV2(api_key="unused", base_url=EMBEDDER_SERVER),
    cohere.Client(api_key="unused", base_url=EMBEDDER_SERVER),
):
    answer = client.rerank(model=EMBEDDER, query=TEXTS[0], documents=TEXTS[1:])
    assert [each.index for each in answer.results] == ORDER
    assert all(abs(each.relevance_score - COSINES[each.index]) < 1e-4 for each in answer.results)
    assert answer.meta.billed_units.search_units == 1
    best = client.rerank(model=EMBEDDER, query=TEXTS[0], documents=TEXTS[1:], top_n=2)
    assert [each.index for each in best.results] == ORDER[:2]
    raised = ""
    try:
        client.rerank(model=EMBEDDER, query=TEXTS[0], documents=[])
    except cohere.BadRequestError as error:
        raised = str(error)
    assert "documents is empty" in raised, raised
    try:
        client.rerank(model="other", query=TEXTS[0], documents=TEXTS)
    except cohere.NotFoundError as error:
        raised = str(error)
    assert "other" in raised, raised
