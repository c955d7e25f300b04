"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

from typing import Any

_HEAD = {"id": str, "created": int, "model": str, "system_fingerprint?": str}
_USAGE = {
    **dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), int),
    "dropped_messages?": int,
    "summary?": {
        **dict.fromkeys(("messages", "prompt_tokens", "completion_tokens"), int),
        "failed": (str, None),
    },
    "cost?": float,
    "prompt_tokens_details": {"cached_tokens": int},
    "completion_tokens_details": dict.fromkeys(
        ("accepted_prediction_tokens", "rejected_prediction_tokens", "reasoning_tokens?"), int
    ),
}
_PROMPT_LOGPROBS = [({str: {"logprob": float, "rank": int, "decoded_token": str}}, None)]
_COMPLETION_LOGPROBS = {
    "tokens": [str],
    "token_logprobs": [(float, None)],
    "top_logprobs": [({str: float}, None)],
    "text_offset": [int],
}
_TOKEN: dict[str, Any] = {"token": str, "logprob": float, "bytes": [int]}
TOKEN_LOGPROBS = [{**_TOKEN, "top_logprobs": [_TOKEN]}]
_CALL = {"id": str, "type": "function", "function": {"name": str, "arguments": str}}
_MESSAGE = {
    "role": "assistant",
    "content": (str, None),
    "refusal": None,
    "reasoning_content?": str,
    "reasoning?": str,
    "tool_calls?": [_CALL],
}
COMPLETION = {
    **_HEAD,
    "object": "text_completion",
    "choices": [
        {
            "index": int,
            "text": str,
            "logprobs": (_COMPLETION_LOGPROBS, None),
            "finish_reason": ("stop", "length"),
            "prompt_logprobs?": _PROMPT_LOGPROBS,
        }
    ],
    "usage": _USAGE,
}
CHAT = {
    **_HEAD,
    "object": "chat.completion",
    "choices": [
        {
            "index": int,
            "message": _MESSAGE,
            "logprobs": ({"content": TOKEN_LOGPROBS, "refusal": None}, None),
            "finish_reason": ("stop", "length", "tool_calls"),
        }
    ],
    "usage": _USAGE,
    "prompt_logprobs?": _PROMPT_LOGPROBS,
}
EMBEDDINGS = {
    "object": "list",
    "data": [{"object": "embedding", "index": int, "embedding": ([float], str)}],
    "model": str,
    "usage": {"prompt_tokens": int, "total_tokens": int},
}
MODEL = {
    "id": str,
    "object": "model",
    "created": int,
    "owned_by": "penstock",
    "root": str,
    "parent": None,
    "max_model_len?": int,  # of a model that is loaded, as the next
    "fingerprint?": str,
}
MODELS = {"object": "list", "data": [MODEL]}
TOKENS = {"count": int, "max_model_len": int, "tokens": [int], "token_strs": ([str], None)}
TOKENIZER = {
    **dict.fromkeys(("bos_token", "eos_token", "chat_template"), (str, None)),
    "model_max_length": int,
}
