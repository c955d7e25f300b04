"""Settings of models: model.yaml, config.pbtxt, and their errors."""

import pytest

from penstock.repository.settings import ModelSettings, SettingsError, chosen_versions, read_yaml
from penstock.repository.triton import read_pbtxt

CONFIG = """
# a comment
name: "simple"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [
  { name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 16 ] },
  { name: 'INPUT1' data_type: TYPE_STRING dims: 1 reshape: { shape: [ ] } }
]
output { name: "OUT" data_type: TYPE_INT64, dims: [ 4 ], label_filename: "labels.txt" }
version_policy: { specific { versions: [1, 3] } }
instance_group [ { count: 2; kind: KIND_CPU } ]
dynamic_batching {
  preferred_batch_size: [ 2, 6 ]
  max_queue_delay_microseconds: 500000
  preserve_ordering: true
  priority_levels: 2
  default_priority_level: 2
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 100 max_queue_size: 8 }
  priority_queue_policy { key: 1 value: { timeout_action: REJECT allow_timeout_override: true } }
}
parameters { key: "a" value: { string_value: "b\\n" "c" } }
response_cache { enable: true }
"""


def test_a_configuration_of_triton() -> None:
    settings = read_pbtxt(CONFIG)
    assert (settings.kind, settings.max_batch_size, settings.versions) == ("onnx", 8, (1, 3))
    assert settings.instances == 2 and settings.cache
    first, second = settings.inputs
    assert (first.datatype, first.dims, second.datatype, second.reshape) == ("FP32", (-1, 16), "BYTES", ())
    assert settings.outputs[0].labels == "labels.txt"
    batching = settings.batching
    assert (batching.preferred, batching.max_wait, batching.wait, batching.keep_order) == ((2, 6), 0.5, "always", True)
    high, low = batching.levels
    assert (high.late, high.override, low.late, low.timeout, low.max_queue) == ("refuse", True, "delay", 0.0001, 8)
    assert settings.triton["parameters"] == {"a": {"string_value": "b\nc"}}
    assert read_pbtxt("max_batch_size: 0").batching.mode == "none"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size: 8\nmax_batchsize: 3", "line 2: unknown field 'max_batchsize'"),
        ("input { name: 3 }", "where a text in quotation marks is needed"),
        ('input { name: "a"', "the name of a field lacks"),
        ("max_batch_size: x", "where a number is needed"),
        ("sequence_batching { }", "sequence_batching is not supported"),
        ('model_operations { op_library_filename: "a.so" }', "libraries of custom operators are code"),
        ('backend: "python"', "backend 'python' is not supported"),
        ('name: "\x01', "a character is not expected"),
        ('input { name: "a" data_type: TYPE_FP99 dims: 1 }', "datatype 'FP99'"),
        ("instance_group { count: 65 }", "instances is 65"),
        (f"dynamic_batching {{ priority_levels: {2**64 - 1} }}", "the limit is 32: use fewer levels"),
        ("max_batch_size: -1", "max-batch-size is -1"),
        ("optimization { " + "input_pinned_memory { " * 50, "unknown field"),
        ('default_model_filename: "../m.onnx"', "it must be the name of a file"),
    ],
)
def test_errors_of_configurations(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_pbtxt(text)
    assert message in str(error.value)


def test_our_own_settings() -> None:
    settings = read_yaml(
        "kind: onnx\nversions: {latest: 2}\nlabels: {stable: 1}\nbatching:\n  max-wait: 0.01\n  preferred: [4]\n"
        "  levels:\n    - {max-queue: 3, late: delay}\n"
    )
    assert settings.labels == {"stable": 1} and settings.batching.levels[0].max_queue == 3
    assert chosen_versions(settings, [3, 1, 2]) == [2, 3]
    assert read_yaml("") == ModelSettings() and chosen_versions(ModelSettings(), [1, 10, 9]) == [10]
    assert chosen_versions(read_yaml("versions: all"), [2, 1]) == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: pickle", "kind"),
        ("max-batchsize: 3", "max-batchsize"),
        ("batching: {mode: static}", "set the longest wait"),
        ("instances: 0", "instances is 0; it must be from 1 to 64"),
        ("file: ../x", "it must be the name of a file"),
        ("[1]", "object"),
        ("a: {", "not valid YAML"),
        ("batching: {default-level: 2}", "batching.default-level is 2"),
    ],
)
def test_errors_of_our_own_settings(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        read_yaml(text)
    assert message in str(error.value)


def test_a_version_that_is_not_there() -> None:
    assert chosen_versions(read_yaml("versions: [2, 7]"), [1, 2]) == [2]
