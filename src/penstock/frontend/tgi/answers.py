"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

_TOKEN = {"id": int, "text": str, "logprob": (float, None), "special": bool}
_DETAILS = {
    "finish_reason": ("length", "eos_token", "stop_sequence"),
    "generated_tokens": int,
    "seed": int,
    "prefill": [{"id": int, "text": str, "logprob": (float, None)}],
    "tokens": [_TOKEN],
    "top_tokens?": [[_TOKEN]],
}
GENERATED = {"generated_text": str, "details?": _DETAILS}
INFO = {
    **dict.fromkeys(("model_id", "model_dtype", "model_pipeline_tag", "router", "version"), str),
    "model_sha": (str, None),
    **dict.fromkeys(
        (
            *("max_concurrent_requests", "max_best_of", "max_stop_sequences", "max_input_tokens", "max_total_tokens"),
            "max_client_batch_size",
        ),
        int,
    ),
}
