"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

from typing import Any

from penstock.frontend.requests.pages import page_shape

_WRITTEN = {"type": "output_text", "text": str, "annotations": [Any], "logprobs": [Any]}
_REFUSAL = {"type": "refusal", "refusal": str}
_READ = {"type": "input_text", "text": str}
_STATUS = ("completed", "incomplete")
_REASONING = {
    "id": str,
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": str}],
    "content": [{"type": "reasoning_text", "text": str}],
    "status": _STATUS,
}
_CALL = {"id": str, "type": "function_call", "call_id": str, "name": str, "arguments": str, "status": _STATUS}
_MESSAGE = {"id": str, "type": "message", "role": "assistant", "content": [_WRITTEN], "status": _STATUS}
_ITEMS = (
    {**_MESSAGE, "role": str, "content": [(_WRITTEN, _READ, _REFUSAL)]},
    _REASONING,
    _CALL,
    {"id": str, "type": "function_call_output", "call_id": str, "output": (str, [(_READ, _REFUSAL)]), "status": str},
)
_FORMAT = {"type": "json_schema", "name": str, "schema": Any, "description": (str, None), "strict": bool}
_USAGE = {
    **dict.fromkeys(("input_tokens", "output_tokens", "total_tokens"), int),
    "input_tokens_details": {"cached_tokens": int, "cache_write_tokens": int},
    "output_tokens_details": {"reasoning_tokens": int},
}
RESPONSE = {
    "id": str,
    "object": "response",
    "created_at": int,
    "completed_at?": int,
    "status": _STATUS,
    "model": str,
    "output": [(_MESSAGE, _REASONING, _CALL)],
    "usage": _USAGE,
    "error": None,
    "incomplete_details": ({"reason": "max_output_tokens"}, None),
    # the request's own parameters, repeated
    **dict.fromkeys(("instructions", "previous_response_id", "user"), (str, None)),
    **dict.fromkeys(("background", "parallel_tool_calls", "store"), bool),
    **dict.fromkeys(("temperature", "top_p"), float),
    "max_output_tokens": (int, None),
    "metadata": {str: str},
    "reasoning": {"effort": (str, None), "summary": (str, None)},
    "service_tier": "default",
    "text": {"format": ({"type": ("text", "json_object")}, _FORMAT)},
    "tool_choice": (str, {str: Any}),
    "tools": [
        {"type": "function", "name": str, "description": (str, None), "parameters": ({str: Any}, None), "strict": bool}
    ],
    "truncation": ("auto", "disabled"),
}
DELETED = {"id": str, "object": "response", "deleted": bool}
INPUT_TOKENS = {"object": "response.input_tokens", "input_tokens": int}
INPUT_ITEMS = page_shape(_ITEMS)
