"""The shapes of answers, for the OpenAPI document (see `penstock.frontend.describe.json_schema`)."""

_HEAD = {"model_name": str, "model_version": str, "id?": str}
_TENSOR = {"name": str, "datatype": str, "shape": [int]}
GENERATED = {**_HEAD, "text_output": str}
INFERRED = {**_HEAD, "outputs": [{**_TENSOR, "data": [str]}]}
SERVER = {"name": str, "version": str, "extensions": [str]}
MODEL = {"name": str, "versions": [str], "platform": str, "inputs": [_TENSOR], "outputs": [_TENSOR]}
_CONFIGURED = {"name": str, "data_type": str, "dims": [int]}
CONFIG = {
    **dict.fromkeys(("name", "platform", "backend"), str),
    "max_batch_size": int,
    "input": [{**_CONFIGURED, "optional": bool}],
    "output": [_CONFIGURED],
    "model_transaction_policy": {"decoupled": bool},
}
READY = {"name": str, "ready": bool}
STATS = {"model_stats": [{"name": str, "version": str}]}
REPOSITORY = [{"name": str, "version": str, "state": "READY", "reason": str}]
