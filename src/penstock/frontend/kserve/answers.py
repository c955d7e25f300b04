"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

from typing import Any

_HEAD = {"model_name": str, "model_version": str, "id?": str}
_TENSOR = {"name": str, "datatype": str, "shape": [int]}
GENERATED = {**_HEAD, "text_output": str}
_ANY = {str: Any}
INFERRED = {**_HEAD, "outputs": [{**_TENSOR, "data?": [(str, float, bool)], "parameters?": _ANY}]}
SERVER = {"name": str, "version": str, "extensions": [str]}
MODEL = {"name": str, "versions": [str], "platform": str, "inputs": [_TENSOR], "outputs": [_TENSOR]}
_CONFIGURED = {"name": str, "data_type": str, "dims": [int]}
CONFIG = {
    **dict.fromkeys(("name", "platform", "backend"), str),
    "max_batch_size": int,
    "input": [{**_CONFIGURED, "optional": bool}],
    "output": [{**_CONFIGURED, "label_filename?": str}],
    "model_transaction_policy?": {"decoupled": bool},
    # of one-shot models
    "version_policy?": _ANY,
    "dynamic_batching?": _ANY,
    "ensemble_scheduling?": _ANY,
    "response_cache?": _ANY,
    "optimization?": _ANY,
    "parameters?": _ANY,
    "instance_group?": [{"name": str, "kind": str, "count": int}],
    "default_model_filename?": str,
}
READY = {"name": str, "ready": bool}
_TIME = {"count": int, "ns": int}
_COMPUTE = {f"compute_{part}": _TIME for part in ("input", "infer", "output")}
_COUNTS = {
    **dict.fromkeys(("last_inference?", "inference_count?", "execution_count?"), int),
    "inference_stats?": {str: _TIME},
    "batch_stats?": [{"batch_size": int, **_COMPUTE}],
    "memory_usage?": [{"type": str, "id": int, "byte_size": int}],
}
STATS = {"model_stats": [{"name": str, "version": str, **_COUNTS}]}
REPOSITORY = [{"name": str, "version?": str, "state?": str, "reason?": str}]
REGIONS = [{"name": str, "key": str, "offset": int, "byte_size": int}]
_JUDGE = {"name": str, "requests": int, **dict.fromkeys(("mean", "low", "high", "tolerance"), float)}
_ROLLOUT = {**dict.fromkeys(("name", "incumbent", "candidate", "status", "reason"), str), "share": int, "plan": [int]}
ROLLOUTS = {"rollouts": [{**_ROLLOUT, "seconds": float, "judges": [_JUDGE]}]}
