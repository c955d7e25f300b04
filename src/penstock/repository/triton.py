"""Triton's model configuration: reads config.pbtxt, and writes what Triton's clients read.

Source of the fields: model_config.proto of Triton's common repository. A field that has an effect which Penstock does
not have is refused by its name.
"""

import re
from collections.abc import Sequence
from typing import Any

from penstock.messages.tensors import TensorSpec
from penstock.repository.settings import FILES, MAX_LEVELS, Latest, ModelSettings, SettingsError, of_fields
from penstock.repository.textproto import Map, TextProtoError, read_textproto
from penstock.schedule.batcher import LevelRules

# A field is `type name`; * after the type: a list; {type}: a map from texts.
_TENSOR = (
    "str name; str data_type; int* dims; Shape reshape; str format; bool is_shape_tensor; bool is_non_linear_format_io"
)
_MESSAGES = {
    "Config": (
        "str name; str platform; str backend; str runtime; str default_model_filename; int max_batch_size; "
        "Versions version_policy; Input* input; Output* output; Group* instance_group; Batching dynamic_batching; "
        "Sequence sequence_batching; Ensemble ensemble_scheduling; Optimization optimization; {Parameter} parameters; "
        "{str} metric_tags; Warmup* model_warmup; Operations model_operations; Decoupled model_transaction_policy; "
        "Agents model_repository_agents; Enabled response_cache"
    ),
    "Versions": "Latest latest; Empty all; Specific specific",
    "Latest": "int num_versions",
    "Empty": "",
    "Specific": "int* versions",
    "Input": f"{_TENSOR}; bool allow_ragged_batch; bool optional",
    "Output": f"{_TENSOR}; str label_filename",
    "Shape": "int* shape",
    "Group": (
        "str name; str kind; str host_policy; int count; int* gpus; bool passive; str* profile; "
        "Device* secondary_devices; Limiter rate_limiter"
    ),
    "Device": "str kind; int device_id",
    "Limiter": "Resource* resources; int priority",
    "Resource": "str name; bool global; int count",
    "Batching": (
        "int* preferred_batch_size; int max_queue_delay_microseconds; bool preserve_ordering; int priority_levels; "
        "int default_priority_level; Queue default_queue_policy; {Queue} priority_queue_policy"
    ),
    "Queue": "str timeout_action; int default_timeout_microseconds; bool allow_timeout_override; int max_queue_size",
    "Sequence": "int max_sequence_idle_microseconds",
    "Ensemble": "Step* step",
    "Step": "str model_name; int model_version; {str} input_map; {str} output_map; str model_namespace",
    "Optimization": (
        "Level graph; str priority; Cuda cuda; Accelerators execution_accelerators; Enabled input_pinned_memory; "
        "Enabled output_pinned_memory; int gather_kernel_buffer_threshold; bool eager_batching"
    ),
    "Level": "int level",
    "Cuda": "bool graphs; bool busy_wait_events; bool output_copy_stream",
    "Accelerators": "Named* gpu_execution_accelerator; Named* cpu_execution_accelerator",
    "Named": "str name; {str} parameters",
    "Enabled": "bool enable",
    "Parameter": "str string_value",
    "Warmup": "str name; int batch_size; int count; {Sample} inputs",
    "Sample": "str data_type; int* dims; bool zero_data; bool random_data; str input_data_file",
    "Operations": "str* op_library_filename",
    "Decoupled": "bool decoupled",
    "Agents": "Named* agents",
}
_TYPES = {"str": str, "int": int, "bool": bool}


def _field_type(text: str) -> Any:
    """The type of a field, as the reader of the text format takes it."""
    if text.startswith("{"):
        return Map(_field_type(text[1:-1]))
    if text.endswith("*"):
        return [_field_type(text[:-1])]
    return _TYPES.get(text) or _message(text)


def _message(name: str) -> dict[str, Any]:
    fields = (field.split() for field in filter(None, _MESSAGES[name].split("; ")))
    return {name: _field_type(kind) for kind, name in fields}


SCHEMA = _message("Config")
# Fields whose effect Penstock does not have.
_REFUSED = {
    "sequence_batching": "requests of a sequence have no state here",
    "model_operations": "libraries of custom operators are code, and are not loaded",
    "model_repository_agents": "there are no agents",
}
# Fields that change nothing on a CPU, and are only shown again.
_SHOWN = ("optimization", "metric_tags", "parameters", "instance_group", "model_transaction_policy", "model_warmup")
_KINDS = {
    "onnxruntime": "onnx",
    "onnxruntime_onnx": "onnx",
    **dict.fromkeys(("pytorch", "pytorch_libtorch"), "torch"),
    "ensemble": "pipeline",
    "penstock": "llm",
}
PLATFORMS = {"onnx": "onnxruntime_onnx", "torch": "pytorch_libtorch", "pipeline": "ensemble", "llm": "penstock"}
_BACKENDS = {"onnx": "onnxruntime", "torch": "pytorch", "pipeline": ""}
_MICROSECONDS = 1e6


def read_pbtxt(text: str) -> ModelSettings:
    """Returns the settings in the text of a config.pbtxt. Raises SettingsError, which names the line or the field."""
    try:
        return of_config(read_textproto(text, SCHEMA))
    except TextProtoError as error:
        raise SettingsError(str(error)) from None


def of_config(config: dict[str, Any]) -> ModelSettings:
    """Returns the settings of a model configuration in its JSON form. Raises SettingsError."""
    _check_names(config, SCHEMA, "")
    for name, why in _REFUSED.items():
        if name in config:
            raise SettingsError(f"{name} is not supported: {why}; leave it out")
    named = config.get("backend") or config.get("platform") or ""
    kind = "pipeline" if "ensemble_scheduling" in config else _KINDS.get(named)
    if named and kind is None:
        raise SettingsError(f"backend {named[:60]!r} is not supported; the backends are {', '.join(_KINDS)}")
    fields: dict[str, Any] = {
        "max-batch-size": int(config.get("max_batch_size", 0)),
        "inputs": [_tensor(each) for each in config.get("input", ())],
        "outputs": [_tensor(each) for each in config.get("output", ())],
        "versions": _policy(config.get("version_policy", {})),
        "file": config.get("default_model_filename", ""),
        "instances": sum(max(int(group.get("count", 1)), 1) for group in config.get("instance_group", ())) or 1,
        "rate-limiter": _limiter(config.get("instance_group", ())),
        "threads": _threads(config.get("parameters", {})),
        "batching": _batching(config.get("dynamic_batching")),
        "cache": config.get("response_cache", {}).get("enable", False),
        "triton": {name: config[name] for name in (*_SHOWN, "dynamic_batching") if name in config},
    }
    if kind is not None:
        fields["kind"] = kind
    if "ensemble_scheduling" in config:
        fields["steps"] = [
            {
                "model": step.get("model_name", ""),
                "version": str(version) if (version := step.get("model_version", -1)) > 0 else "",
                "inputs": step.get("input_map", {}),
                "outputs": step.get("output_map", {}),
            }
            for step in config["ensemble_scheduling"].get("step", ())
        ]
    return of_fields(fields)


def config_of(
    name: str, settings: ModelSettings, max_rows: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> dict[str, Any]:
    """Returns the fields of Triton's ModelConfig that clients read."""
    given = {each.name: each for each in (*settings.inputs, *settings.outputs)}
    kind, policy = settings.kind or "onnx", settings.versions

    def tensor(spec: TensorSpec) -> dict[str, Any]:
        dims = given[spec.name].dims if spec.name in given else spec.shape[1 if max_rows else 0 :]
        return {"name": spec.name, "data_type": _type(spec.datatype), "dims": list(dims)}

    versions: dict[str, Any] = {"latest": {"num_versions": policy.latest if isinstance(policy, Latest) else 1}}
    if policy == "all" or isinstance(policy, tuple):
        versions = {"all": {}} if policy == "all" else {"specific": {"versions": list(policy)}}
    config: dict[str, Any] = {
        "name": name,
        "platform": PLATFORMS[kind],
        "backend": _BACKENDS[kind],
        "version_policy": versions,
        "max_batch_size": max_rows,
        "input": [tensor(spec) | {"optional": spec.optional} for spec in inputs],
        "output": [
            tensor(spec) | {"label_filename": given[spec.name].labels if spec.name in given else ""} for spec in outputs
        ],
        "default_model_filename": settings.file or FILES.get(kind, ""),
        **{name: settings.triton[name] for name in ("optimization", "parameters") if name in settings.triton},
    }
    if kind == "pipeline":
        config["ensemble_scheduling"] = {
            "step": [
                {
                    "model_name": step.model,
                    "model_version": int(step.version or -1),
                    "input_map": step.inputs,
                    "output_map": step.outputs,
                }
                for step in settings.steps
                if step.kind == "model"
            ]
        }
        return config
    config["instance_group"] = [{"name": f"{name}_0", "kind": "KIND_CPU", "count": settings.instances}]
    if max_rows and settings.batching.mode != "none":
        rules = settings.batching
        config["dynamic_batching"] = settings.triton.get("dynamic_batching") or {
            "preferred_batch_size": list(rules.preferred),
            "max_queue_delay_microseconds": round(rules.max_wait * _MICROSECONDS),
            "preserve_ordering": rules.keep_order,
        }
    if settings.cache:
        config["response_cache"] = {"enable": True}
    return config


def _check_names(fields: dict[str, Any], schema: Any, where: str) -> None:
    """Raises SettingsError for a field that the schema does not have, or that lacks a whole number: JSON has not been
    checked."""
    for name, value in fields.items():
        if name not in schema:
            raise SettingsError(f"unknown field {(where + name)[:100]!r}; see Triton's model_config.proto")
        kind = schema[name][0] if isinstance(schema[name], list) else schema[name]
        for each in value if isinstance(value, list) else [value]:
            if isinstance(kind, dict) and not isinstance(each, dict):
                raise SettingsError(f"{where + name} must be an object")
            if kind is int and not re.fullmatch(r"-?\d{1,20}", str(each)):  # the JSON form of protobuf also has texts
                raise SettingsError(f"{where + name} is {str(each)[:40]!r}; it must be a whole number")
            if isinstance(kind, dict):
                _check_names(each, kind, f"{where}{name}.")


def _tensor(fields: dict[str, Any]) -> dict[str, Any]:
    name = fields.get("name", "")
    for flag in ("is_shape_tensor", "allow_ragged_batch", "is_non_linear_format_io"):
        if fields.get(flag):
            raise SettingsError(f"{flag} of {name!r} is not supported; leave it out")
    found = {
        "name": name,
        "datatype": fields.get("data_type", "").removeprefix("TYPE_").replace("STRING", "BYTES"),
        "dims": [int(size) for size in fields.get("dims", ())],
        "optional": fields.get("optional", False),
        "labels": fields.get("label_filename", ""),
    }
    if "reshape" in fields:
        found["reshape"] = [int(size) for size in fields["reshape"].get("shape", ())]
    return found


def _policy(policy: dict[str, Any]) -> Any:
    if "all" in policy:
        return "all"
    if "specific" in policy:
        return [int(version) for version in policy["specific"].get("versions", ())]
    return {"latest": int(policy.get("latest", {}).get("num_versions", 1) or 1)}


def _batching(fields: dict[str, Any] | None) -> dict[str, Any]:
    """Without dynamic batching in the configuration, each request runs alone, as in Triton."""
    if fields is None:
        return {"mode": "none"}
    count = int(fields.get("priority_levels", 0))
    if count > MAX_LEVELS:
        raise SettingsError(f"priority_levels is {count}; the limit is {MAX_LEVELS}: use fewer levels")
    default = fields.get("default_queue_policy", {})
    policies = {int(level): policy for level, policy in fields.get("priority_queue_policy", {}).items()}
    return {
        "max-wait": int(fields.get("max_queue_delay_microseconds", 0)) / _MICROSECONDS,
        "wait": "always",
        "preferred": [int(rows) for rows in fields.get("preferred_batch_size", ())],
        "keep-order": fields.get("preserve_ordering", False),
        "levels": [_level(policies.get(number + 1, default)) for number in range(max(count, 1))],
        "default-level": int(fields.get("default_priority_level", 0)) or 1,
    }


def _threads(parameters: dict[str, Any]) -> int:
    """The threads of a run, as Triton's backend for onnxruntime names them."""
    given = parameters.get("intra_op_thread_count", {}).get("string_value", "1")
    if not given.isdigit():
        raise SettingsError(f"parameter intra_op_thread_count is {given[:20]!r}; it must be a whole number")
    return max(int(given), 1)


def _limiter(groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the resources that a batch takes. `global` has no effect, as there is one device."""
    given = [group.get("rate_limiter", {}) for group in groups]
    if any(each != given[0] for each in given):
        raise SettingsError("the instance_groups have different rate_limiters, and one device; give them the same")
    limiter = given[0] if given else {}
    units = {each.get("name", ""): int(each.get("count", 1)) for each in limiter.get("resources", ())}
    return {"resources": units, "priority": int(limiter.get("priority", 0)) or 1}


def _level(policy: dict[str, Any]) -> dict[str, Any]:
    return {
        "max-queue": int(policy.get("max_queue_size", 0)) or LevelRules().max_queue,
        "timeout": int(policy.get("default_timeout_microseconds", 0)) / _MICROSECONDS,
        "late": "delay" if policy.get("timeout_action") in ("DELAY", 1) else "refuse",
        "override": policy.get("allow_timeout_override", False),
    }


def _type(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"
