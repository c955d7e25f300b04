"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

from penstock.frontend.requests.pages import page_shape

FILE = {
    "id": str,
    "object": "file",
    "bytes": int,
    "created_at": int,
    "expires_at": int,
    "filename": str,
    "purpose": str,
    "status": "processed",
}
DELETED = {"id": str, "object": "file", "deleted": bool}
_ERROR = {"code": (str, None), "line": (int, None), "message": str, "param": (str, None)}
_STATUSES = ("validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
_ENDS = [f"{status}_at" for status in _STATUSES[1:]]
BATCH = {
    "id": str,
    "object": "batch",
    "endpoint": str,
    "model": str,
    "errors": ({"object": "list", "data": [_ERROR]}, None),
    "input_file_id": str,
    "completion_window": str,
    "status": _STATUSES,
    "output_file_id": (str, None),
    "error_file_id": (str, None),
    "created_at": int,
    "expires_at": int,
    **dict.fromkeys(_ENDS, (int, None)),
    "request_counts": dict.fromkeys(("total", "completed", "failed"), int),
    "metadata": ({str: str}, None),
}
FILES = page_shape(FILE)
BATCHES = page_shape(BATCH)
