"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

from typing import Any

_CALL = {"id": str, "function": {"index": int, "name": str, "arguments": {str: Any}}}
_REPLY = {"thinking?": str, "tool_calls?": [_CALL]}
_DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")  # nanoseconds
_TOKEN: dict[str, Any] = {"token": str, "logprob": float, "bytes": [int]}
_ANSWER = {
    "model": str,
    "created_at": str,
    "done": bool,
    "done_reason": ("stop", "length", "load", "unload"),
    **dict.fromkeys((f"{name}?" for name in _DURATIONS), int),
    "prompt_eval_count?": int,
    "eval_count?": int,
    "logprobs?": [{**_TOKEN, "top_logprobs": [_TOKEN]}],
}
CHAT = {**_ANSWER, "message": {"role": "assistant", "content": str, **_REPLY}}
GENERATE = {**_ANSWER, "response": str, **_REPLY, "context?": [int]}
EMBED = {
    "model": str,
    "embeddings": [[float]],
    **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), int),
}
EMBEDDINGS = {"embedding": [float]}
_DETAILS = {
    **dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), str),
    "families": [str],
}
_MODEL = {
    **dict.fromkeys(("name", "model", "modified_at", "digest"), str),
    "size": int,
    "details": _DETAILS,
}
MODELS = {"models": [_MODEL]}
RUNNING = {"models": [{**_MODEL, "expires_at": str, "size_vram": int, "context_length": int}]}
VERSION = {"version": str}
MODEL = {
    **dict.fromkeys(("modelfile", "parameters", "template", "modified_at"), str),
    "details": _DETAILS,
    "model_info": {str: Any},
    "capabilities": [str],
}
PULLED = {"status": "success"}
