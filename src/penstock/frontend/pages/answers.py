"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

SERVER = {
    **dict.fromkeys(("version", "model", "dtype"), str),
    "aliases": [str],
    **dict.fromkeys(("max_model_len", "vocab_size"), int),
    **dict.fromkeys(("embeddings", "chat", "tools", "reasoning"), bool),
    "defaults": {str: float},
    "ranges": {str: [float]},
    "limits": {str: int},
}
_COUNTS = ("restarts", "block_size", "max_num_seqs", "running", "waiting")
LOAD = {
    "time": float,
    "state": ("ready", "restarting", "ended", "asleep"),
    **dict.fromkeys(_COUNTS, int),
    "blocks": [{"total": int, "held": int, "cached": int}],
    "counters": {str: (float, {str: int})},
    "histograms": {str: [[(float, None)]]},  # pairs: upper bound in seconds, None for the last one; cumulative count
}
USAGE = {"since": float, "currency": str, "rows": [{str: (str, float)}]}
