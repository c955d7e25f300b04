"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

from typing import Any

_COUNTS = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
_REASONS = ("end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use")
MESSAGE = {
    "id": str,
    "type": "message",
    "role": "assistant",
    "model": str,
    "content": [
        (
            {"type": "text", "text": str},
            {"type": "thinking", "thinking": str, "signature": str},
            {"type": "tool_use", "id": str, "name": str, "input": {str: Any}},
        )
    ],
    "stop_reason": _REASONS,
    "stop_sequence": (str, None),
    "usage": {**dict.fromkeys(_COUNTS, int), "output_tokens_details?": {"thinking_tokens": int}},
    "context_management?": {"applied_edits": [Any]},
}
COUNT = {"input_tokens": int}
MODEL = {
    "type": "model",
    "id": str,
    "display_name": str,
    "created_at": str,
    "lifecycle": "active",
    "max_input_tokens": int,
    "max_tokens": int,
}
MODELS = {"data": [MODEL], "has_more": bool, "first_id": (str, None), "last_id": (str, None)}
