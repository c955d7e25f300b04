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
        "string name = 1; string platform = 2; int32 max_batch_size = 4; ConfigInput* input = 5; "
        "ConfigOutput* output = 6; string backend = 17; Policy model_transaction_policy = 19"
    ),
    "ConfigInput": "string name = 1; DataType data_type = 2; int64* dims = 4; bool optional = 8",
    "ConfigOutput": "string name = 1; DataType data_type = 2; int64* dims = 3",
    "Policy": "bool decoupled = 1",
    "Repository": "string repository_name = 1; bool ready = 2",
    "Index": "IndexEntry* models = 1",
    "IndexEntry": "string name = 1; string version = 2; string state = 3; string reason = 4",
    "LoadedModel": "string repository_name = 1; string model_name = 2",
    "Statistics": "StatisticsEntry* model_stats = 1",
    "StatisticsEntry": "string name = 1; string version = 2",
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
    "Contents": "bool* bool_contents = 1; bytes* bytes_contents = 8",
    "HealthRequest": "string service = 1",
    "HealthAnswer": "int32 status = 1",  # an enum: SERVING and the other constants below
}
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3

_FIELD = re.compile(r"(?P<type>\w+)(?P<mark>[*?]?) (?P<name>\w+) = (?P<number>\d+)")
_PACKAGE = "penstock"


def _make() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="penstock.proto", package=_PACKAGE, syntax="proto3")
    types = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        types.value.add(name=f"TYPE_{name}", number=number)
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
            field.type = field.TYPE_ENUM if found["type"] == "DataType" else field.TYPE_MESSAGE
            field.type_name = f".{_PACKAGE}.{found['type']}"
        yield field


MESSAGES = _make()
