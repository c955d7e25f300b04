"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

_USAGE = {"prompt_tokens": int, "total_tokens": int}
RANKED = {
    "id": str,
    "model": str,
    "results": [{"index": int, "relevance_score": float, "document?": {"text": str}}],
    "usage": _USAGE,
    "meta": {"api_version": {"version": str}, "billed_units": {"search_units": int}},
}
_LIST = {"id": str, "object": "list", "created": int, "model": str, "usage": _USAGE}
SCORES = {**_LIST, "data": [{"index": int, "object": "score", "score": float}]}
CLASSES = {**_LIST, "data": [{"index": int, "label": str, "probs": [float], "num_classes": int}]}
