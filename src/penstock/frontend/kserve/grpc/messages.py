"""The messages of `inference.GRPCInferenceService` and `grpc.health.v1.Health`, made when this module is imported.

Generated code would need a version of protobuf that is at least the generator's. On the wire, a map is a list of pairs
of `key` and `value`, and it does not matter in which message another one is nested. So neither is used.

Sources: KServe's `open_inference_grpc.proto`, Triton's `grpc_service.proto` and `model_config.proto`.
"""

import re
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

_DATA_TYPES = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)
# The names of enums, in order of their numbers.
_ENUMS = {
    "DataType": tuple(f"TYPE_{name}" for name in _DATA_TYPES),
    "InstanceKind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "TimeoutAction": ("REJECT", "DELAY"),
}
# A field is `type name = number`; * after the type: a list; ? after it: one of the fields of which only one is set.
_MESSAGES = {
    "Empty": "",
    "Live": "bool live = 1",
    "Ready": "bool ready = 1",
    "ModelName": "string name = 1; string version = 2",
    "Server": "string name = 1; string version = 2; string* extensions = 3",
    "Model": "string name = 1; string* versions = 2; string platform = 3; Shape* inputs = 4; Shape* outputs = 5",
    "Shape": "string name = 1; string datatype = 2; int64* shape = 3",
    "ConfigAnswer": "Config config = 1",
    "Config": (
        "string name = 1; string platform = 2; VersionPolicy version_policy = 3; int32 max_batch_size = 4; "
        "ConfigInput* input = 5; ConfigOutput* output = 6; InstanceGroup* instance_group = 7; "
        "string default_model_filename = 8; Batching dynamic_batching = 11; Ensemble ensemble_scheduling = 15; "
        "string backend = 17; Policy model_transaction_policy = 19; CacheConfig response_cache = 24"
    ),
    "VersionPolicy": "Latest latest = 1; Empty all = 2; Specific specific = 3",
    "Latest": "uint32 num_versions = 1",
    "Specific": "int64* versions = 1",
    "InstanceGroup": "string name = 1; int32 count = 2; InstanceKind kind = 4",
    "Batching": (
        "int32* preferred_batch_size = 1; uint64 max_queue_delay_microseconds = 2; bool preserve_ordering = 3; "
        "uint64 priority_levels = 4; uint64 default_priority_level = 5; QueuePolicy default_queue_policy = 6; "
        "LevelPolicy* priority_queue_policy = 7"
    ),
    "QueuePolicy": (
        "TimeoutAction timeout_action = 1; uint64 default_timeout_microseconds = 2; bool allow_timeout_override = 3; "
        "uint32 max_queue_size = 4"
    ),
    "LevelPolicy": "uint64 key = 1; QueuePolicy value = 2",
    "Ensemble": "EnsembleStep* step = 1",
    "EnsembleStep": "string model_name = 1; int64 model_version = 2; Names* input_map = 3; Names* output_map = 4",
    "Names": "string key = 1; string value = 2",
    "CacheConfig": "bool enable = 1",
    "ConfigInput": "string name = 1; DataType data_type = 2; int64* dims = 4; bool optional = 8",
    "ConfigOutput": "string name = 1; DataType data_type = 2; int64* dims = 3; string label_filename = 4",
    "Policy": "bool decoupled = 1",
    "Repository": "string repository_name = 1; bool ready = 2",
    "Index": "IndexEntry* models = 1",
    "IndexEntry": "string name = 1; string version = 2; string state = 3; string reason = 4",
    "LoadedModel": "string repository_name = 1; string model_name = 2; RepositoryPair* parameters = 3",
    "RepositoryPair": "string key = 1; RepositoryValue value = 2",
    "RepositoryValue": "bool? bool_param = 1; int64? int64_param = 2; string? string_param = 3; bytes? bytes_param = 4",
    "Region": "string name = 1; string key = 2; uint64 offset = 3; uint64 byte_size = 4",
    "Regions": "NamedRegion* regions = 1",
    "NamedRegion": "string key = 1; Region value = 2",
    "CudaRegion": "string name = 1; bytes raw_handle = 2; int64 device_id = 3; uint64 byte_size = 4",
    "Statistics": "StatisticsEntry* model_stats = 1",
    "StatisticsEntry": (
        "string name = 1; string version = 2; uint64 last_inference = 3; uint64 inference_count = 4; "
        "uint64 execution_count = 5; Times inference_stats = 6; BatchTimes* batch_stats = 7; Memory* memory_usage = 8"
    ),
    "Times": (
        "Duration success = 1; Duration fail = 2; Duration queue = 3; Duration compute_input = 4; "
        "Duration compute_infer = 5; Duration compute_output = 6; Duration cache_hit = 7; Duration cache_miss = 8"
    ),
    "BatchTimes": (
        "uint64 batch_size = 1; Duration compute_input = 2; Duration compute_infer = 3; Duration compute_output = 4"
    ),
    "Memory": "string type = 1; int64 id = 2; uint64 byte_size = 3",
    "Duration": "uint64 count = 1; uint64 ns = 2",
    "InferRequest": (
        "string model_name = 1; string model_version = 2; string id = 3; Pair* parameters = 4; Input* inputs = 5; "
        "Requested* outputs = 6; bytes* raw_input_contents = 7"
    ),
    "Input": "string name = 1; string datatype = 2; int64* shape = 3; Pair* parameters = 4; Contents contents = 5",
    "Requested": "string name = 1; Pair* parameters = 2",
    "InferAnswer": (
        "string model_name = 1; string model_version = 2; string id = 3; Pair* parameters = 4; Output* outputs = 5; "
        "bytes* raw_output_contents = 6"
    ),
    "Output": "string name = 1; string datatype = 2; int64* shape = 3; Pair* parameters = 4; Contents contents = 5",
    "StreamAnswer": "string error_message = 1; InferAnswer infer_response = 2",
    "Pair": "string key = 1; Value value = 2",
    "Value": (
        "bool? bool_param = 1; int64? int64_param = 2; string? string_param = 3; double? double_param = 4; "
        "uint64? uint64_param = 5"
    ),
    "Contents": (
        "bool* bool_contents = 1; int32* int_contents = 2; int64* int64_contents = 3; uint32* uint_contents = 4; "
        "uint64* uint64_contents = 5; float* fp32_contents = 6; double* fp64_contents = 7; bytes* bytes_contents = 8"
    ),
    "HealthRequest": "string service = 1",
    "HealthAnswer": "int32 status = 1",  # an enum: SERVING and the other constants below
}
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

_FIELD = re.compile(r"(?P<type>\w+)(?P<mark>[*?]?) (?P<name>\w+) = (?P<number>\d+)")
_PACKAGE = "penstock"


def _make() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="penstock.proto", package=_PACKAGE, syntax="proto3")
    for kind, names in _ENUMS.items():
        values = file.enum_type.add(name=kind)
        for number, name in enumerate(names):
            values.value.add(name=name, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if "?" in fields:
            message.oneof_decl.add(name="choice")
        message.field.extend(_fields(fields))
    pool = descriptor_pool.DescriptorPool()  # of its own: a program may also import a client's messages
    pool.Add(file)
    found = ((name, pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _MESSAGES)
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found}


def _fields(text: str) -> Iterator[Any]:
    for part in filter(None, text.split("; ")):
        found = _FIELD.fullmatch(part)
        assert found is not None, part
        many = found["mark"] == "*"
        field = descriptor_pb2.FieldDescriptorProto(name=found["name"], number=int(found["number"]))
        field.label = field.LABEL_REPEATED if many else field.LABEL_OPTIONAL
        if found["mark"] == "?":
            field.oneof_index = 0
        if found["type"][0].islower():
            field.type = getattr(field, f"TYPE_{found['type'].upper()}")
        else:
            field.type = field.TYPE_ENUM if found["type"] in _ENUMS else field.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{found['type']}"
        yield field


MESSAGES = _make()


def encode(message: Any) -> bytes:
    encoded: bytes = message.SerializeToString()
    return encoded
