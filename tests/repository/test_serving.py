"""`penstock serve --repository`: a real server, its processes, and clients over HTTP and gRPC."""

import json
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from penstock.messages.arrays import pack_strings
from tests.e2e.server import serving
from tests.engine.processes import children
from tests.patience import AT_ONCE, PATIENCE, wait_for
from tests.ports import free_port
from tests.repository import onnx_files as files
from tests.repository.onnx_files import floats, put
from tests.repository.served import Served, tensor

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
grpc = pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")

from penstock.frontend.kserve.grpc.messages import INFERENCE, MESSAGES  # noqa: E402

PBTXT = """#pb
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_FP32 dims: [ 4 ] }, { name: "INPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 4 ] label_filename: "labels.txt" },
  { name: "OUTPUT1" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching { max_queue_delay_microseconds: 100000 preferred_batch_size: [ 4 ] }
"""
ENSEMBLE = """#pb
platform: "ensemble"
max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step [
  { model_name: "doubled" model_version: -1 input_map { key: "x" value: "IN" } output_map { key: "y" value: "a" } },
  { model_name: "addsub" model_version: -1
    input_map { key: "INPUT0" value: "a" } input_map { key: "INPUT1" value: "IN" }
    output_map { key: "OUTPUT0" value: "OUT" } }
] }
"""


X = tensor("x", [1, 2, 3, 4], [1, 4])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("repository")
    put(root, "addsub", files.add_sub(), settings=PBTXT)
    (root / "addsub" / "labels.txt").write_text("zero\none\ntwo\n")
    put(root, "doubled", files.scale(2))
    put(root, "texts", files.identity(files.STRING, ("n",)))
    put(root, "halves", files.identity(files.FLOAT16))
    put(root, "mixes", files.mixes_rows())
    put(root, "rows", files.gather(), settings="batching: {max-wait: 0.2, wait: always}")
    put(root, "fixed", files.add_sub(2))
    put(root, "chained", b"", settings=ENSEMBLE)
    put(root, "broken", b"no model")
    (root / "unknown").mkdir()
    port = free_port()
    flags = ("--repository", str(root), "--grpc-port", str(port), "--state-dir", "none")
    with serving(tmp_path_factory.mktemp("served") / "log", *flags, model=None) as server:
        yield Served(server, root, port)


def test_json_binary_and_grpc_give_the_same(served: Served) -> None:
    a, b = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones((2, 4), np.float32)
    inputs = [tensor("INPUT0", a.tolist(), [2, 4]), tensor("INPUT1", b.ravel().tolist(), [2, 4])]
    answer = served.infer("addsub", *inputs, id="7").json()
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("addsub", "1", "7")
    outputs = {output["name"]: output for output in answer["outputs"]}
    assert outputs["OUTPUT0"]["data"] == (a + b).ravel().tolist() and outputs["OUTPUT1"]["shape"] == [2, 4]

    fields = {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": 32}}
            for name in ("INPUT0", "INPUT1")
        ],
        "outputs": [{"name": "OUTPUT1", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(fields).encode()
    url = served.server.url + "/v2/models/addsub/infer"
    headers = {"Inference-Header-Content-Length": str(len(text))}
    binary = httpx.post(url, content=text + a.tobytes() + b.tobytes(), headers=headers, timeout=PATIENCE)
    assert binary.status_code == 200, binary.text
    split = int(binary.headers["inference-header-content-length"])
    assert [each["name"] for each in json.loads(binary.content[:split])["outputs"]] == ["OUTPUT1"]
    assert np.frombuffer(binary.content[split:], np.float32).tolist() == (a - b).ravel().tolist()

    message = MESSAGES["InferRequest"](model_name="addsub", id="x")
    for name, array in (("INPUT0", a), ("INPUT1", b)):
        message.inputs.add(name=name, datatype="FP32", shape=[2, 4])
        message.raw_input_contents.append(array.tobytes())
    result = served.call("ModelInfer", "InferRequest", "InferAnswer", message)
    assert (result.model_version, result.id, [each.name for each in result.outputs]) == (
        "1",
        "x",
        ["OUTPUT0", "OUTPUT1"],
    )
    assert np.frombuffer(result.raw_output_contents[1], np.float32).tolist() == (a - b).ravel().tolist()

    typed = MESSAGES["InferRequest"](model_name="doubled")
    typed.inputs.add(name="x", datatype="FP32", shape=[1, 4]).contents.fp32_contents.extend([1, 2, 3, 4])
    result = served.call("ModelInfer", "InferRequest", "InferAnswer", typed)
    assert np.frombuffer(result.raw_output_contents[0], np.float32).tolist() == [2, 4, 6, 8]


def test_other_datatypes(served: Served) -> None:
    assert served.data("texts", tensor("x", ["a", "ünï", ""], [3], "BYTES")) == ["a", "ünï", ""]
    assert served.data("halves", tensor("x", [1.5, -2], [1, 2], "FP16")) == [1.5, -2.0]
    text = "427"
    raw = httpx.post(
        served.server.url + "/v2/models/texts/infer", content=text, headers={"Inference-Header-Content-Length": "0"}
    )
    assert raw.content[int(raw.headers["inference-header-content-length"]) :] == pack_strings([text.encode()])
    raw = httpx.post(
        served.server.url + "/v2/models/doubled/infer",
        content=floats(1, 2, 3, 4),
        headers={"Inference-Header-Content-Length": "0"},
    )
    assert raw.content.endswith(floats(2, 4, 6, 8))


def test_classes(served: Served) -> None:
    inputs = [tensor("INPUT0", [1, 5, 3, 4], [1, 4]), tensor("INPUT1", [0, 0, 0, 0], [1, 4])]
    outputs = [{"name": "OUTPUT0", "parameters": {"classification": 2}}]
    (found,) = served.infer("addsub", *inputs, outputs=outputs).json()["outputs"]
    assert found["data"] == ["5.000000:1:one", "4.000000:3"] and found["shape"] == [1, 2]


def test_what_clients_read_of_a_model(served: Served) -> None:
    ones = [tensor(name, [1.0] * 4, [1, 4]) for name in ("INPUT0", "INPUT1")]
    assert served.infer("addsub", *ones).status_code == 200  # the metrics count its batch
    metadata = served.server.get("/v2/models/addsub").json()
    assert metadata["platform"] == "onnxruntime_onnx" and metadata["inputs"][0]["shape"] == [-1, 4]
    config = served.server.get("/v2/models/addsub/config").json()
    assert config["max_batch_size"] == 8 and config["input"][0] == {
        "name": "INPUT0",
        "data_type": "TYPE_FP32",
        "dims": [4],
        "optional": False,
    }
    assert config["dynamic_batching"]["max_queue_delay_microseconds"] == 100_000
    named = MESSAGES["ModelName"](name="addsub")
    same = served.call("ModelConfig", "ModelName", "ConfigAnswer", named).config
    assert (same.max_batch_size, list(same.dynamic_batching.preferred_batch_size)) == (8, [4])
    chained = served.call("ModelConfig", "ModelName", "ConfigAnswer", MESSAGES["ModelName"](name="chained")).config
    assert [step.model_name for step in chained.ensemble_scheduling.step] == ["doubled", "addsub"]
    stats = served.call("ModelStatistics", "ModelName", "Statistics", MESSAGES["ModelName"](name="doubled"))
    assert stats.model_stats[0].name == "doubled" and stats.model_stats[0].memory_usage[0].type == "CPU"
    assert len(served.call("ModelStatistics", "ModelName", "Statistics", MESSAGES["ModelName"]()).model_stats) >= 7
    assert served.server.get("/v2/models/addsub/versions/1/ready").status_code == 200
    assert served.server.get("/v2/models/addsub/versions/2/ready").status_code == 404
    assert served.server.get("/v2/models/fixed/config").json()["max_batch_size"] == 0
    index = served.index()
    assert index["addsub", "1"] == "READY" and index["broken", "1"] == "UNAVAILABLE"
    metrics = served.server.get("/metrics").text
    assert 'nv_inference_count{model="addsub",version="1"}' in metrics
    assert 'penstock_batches_total{model="addsub",reason=' in metrics


@pytest.mark.parametrize(
    ("model", "inputs", "status", "message"),
    [
        ("doubled", [tensor("x", [1, 2], [1, 2])], 400, "unexpected shape for input 'x'"),
        (
            "doubled",
            [tensor("x", [1, 2, 3], [1, 4])],
            400,
            "input byte size mismatch for input 'x' for model 'doubled'. Expected 16, got 12",
        ),
        ("doubled", [tensor("x", [1] * 4, [1, 4], "FP64")], 400, "data-type is 'FP64'"),
        ("doubled", [tensor("z", [1] * 4, [1, 4])], 400, "missing required input(s) ['x']"),
        ("doubled", [X, tensor("z", [1] * 4, [1, 4])], 400, "unexpected inference input 'z'"),
        ("doubled", [X, X], 400, "is there twice"),
        ("doubled", [tensor("x", [1] * 132, [33, 4])], 400, "batch-size must be <= 32"),
        ("doubled", [tensor("x", [1], [2**4, 2**60 + 2])], 400, "causes total element count to exceed"),
        ("doubled", [tensor("x", [1], [2**2, 2**60 + 2])], 400, "byte size overflow"),
        ("texts", [tensor("x", ["a"], [2**62], "BYTES")], 400, "batch-size"),
        ("doubled", [tensor("x", ["a"], [1, 4])], 400, "do not fit FP32"),
        (
            "addsub",
            [tensor("INPUT0", [1] * 4, [1, 4]), tensor("INPUT1", [1] * 8, [2, 4])],
            400,
            "batch size does not match",
        ),
        ("halves", [tensor("x", [1], [1, 1], "BF16")], 400, "BF16 has no form in JSON"),
        ("broken", [X], 404, "broken"),
        ("nowhere", [X], 404, "Request for unknown model: model 'nowhere' is not served here"),
        ("rows", [tensor("x", [9], [1, 1], "INT64")], 400, "model 'rows'"),
    ],
)
def test_errors(served: Served, model: str, inputs: list[dict[str, Any]], status: int, message: str) -> None:
    answer = served.infer(model, *inputs)
    assert answer.status_code == status and message in answer.json()["error"], answer.text


def test_an_output_that_is_named_twice(served: Served) -> None:
    answer = served.infer("doubled", X, outputs=[{"name": "y"}, {"name": "y"}])
    assert answer.status_code == 400 and "output 'y' already exists in request" in answer.json()["error"]


def test_errors_of_binary_bodies(served: Served) -> None:
    url = served.server.url + "/v2/models/doubled/infer"

    def refused(body: bytes, length: str) -> str:
        answer = httpx.post(url, content=body, headers={"Inference-Header-Content-Length": length})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"])

    field = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    text = json.dumps({"inputs": [field]}).encode()
    assert "0 bytes follow" in refused(text, str(len(text)))
    assert "1 bytes follow" in refused(text + bytes(17), str(len(text)))
    assert "Inference-Header-Content-Length is '999'" in refused(text, "999")
    assert "Expected 16" in refused(
        json.dumps({"inputs": [{**field, "parameters": {"binary_data_size": 4}}]}).encode() + bytes(4),
        str(len(text) - 1),
    )


def test_requests_that_wait_share_a_batch_and_get_their_own_rows(served: Served) -> None:
    before = served.stats("addsub")

    def ask(number: int) -> list[float]:
        values = [float(number)] * 4
        return served.data("addsub", tensor("INPUT0", values, [1, 4]), tensor("INPUT1", [1] * 4, [1, 4]))

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(24))) == [[number + 1.0] * 4 for number in range(24)]
    after = served.stats("addsub")
    assert after["inference_count"] - before["inference_count"] == 24
    assert after["execution_count"] - before["execution_count"] <= 16
    assert {batch["batch_size"] for batch in after["batch_stats"]} & {2, 3, 4, 5, 6, 7, 8}


def test_rows_that_influence_each_other_run_alone(served: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: served.data("mixes", X), range(16)))
    assert found == [[2.0, 4.0, 6.0, 8.0]] * 16
    assert (
        "requests run one at a time, because output 'y' of a row depends on the other rows"
        in served.server.log.read_text()
    )


def test_a_request_that_fails_fails_alone(served: Served) -> None:
    def ask(index: int) -> tuple[int, Any]:
        answer = served.infer("rows", tensor("x", [index], [1, 1], "INT64"))
        return answer.status_code, answer.json().get("outputs", [{}])[0].get("data")

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, [0, 1, 9, 2, 3, 77]))
    assert [status for status, _ in found] == [200, 200, 400, 200, 200, 400] and found[3][1] == [4.0, 5.0]


def test_an_ensemble(served: Served) -> None:
    given = tensor("IN", [1, 2, 3, 4], [1, 4])
    assert served.data("chained", given) == [3, 6, 9, 12]
    assert served.load("doubled", "unload").status_code == 200  # and what needs it
    assert served.infer("chained", given).status_code == 404
    assert served.load("chained").status_code == 200  # and its members
    assert served.data("chained", given) == [3, 6, 9, 12] and served.data("doubled", X)[0] == 2


def test_a_new_version_takes_over_and_one_that_fails_does_not(served: Served) -> None:
    root = served.root
    put(root, "moving", files.scale(10), settings="labels: {stable: 1}\nversions: all")
    assert served.load("moving").status_code == 200 and served.data("moving", X)[0] == 10
    put(root, "moving", files.scale(20), 2)
    assert served.load("moving").status_code == 200
    assert served.data("moving", X)[0] == 20 and served.data("moving", X, version="1")[0] == 10
    assert served.data("moving", X, version="stable")[0] == 10
    assert served.server.get("/v2/models/moving").json()["versions"] == ["1", "2"]
    put(root, "moving", b"no model", 2)
    answer = served.load("moving")
    assert answer.status_code == 400 and "load failed for model 'moving'" in answer.json()["error"]
    assert served.data("moving", X)[0] == 20  # the version that served goes on
    put(root, "moving", files.scale(30), 2)
    assert served.load("moving").status_code == 200 and served.data("moving", X)[0] == 30
    assert served.load("moving", "unload").status_code == 200
    answer = served.infer("moving", X)
    assert answer.status_code == 404 and "unloaded" in answer.json()["error"]


def test_settings_and_files_come_with_a_request(served: Served) -> None:
    import base64

    config = json.dumps({"backend": "onnxruntime", "max_batch_size": 3})
    file = {"file:1/model.onnx": base64.b64encode(files.scale(5)).decode()}
    assert served.load("doubled", config=config, **file).status_code == 200
    assert served.data("doubled", X)[0] == 5
    assert served.server.get("/v2/models/doubled/config").json()["max_batch_size"] == 3
    assert (
        served.load("doubled").status_code == 200 and served.data("doubled", X)[0] == 5
    )  # they hold until it is unloaded
    assert served.load("doubled", "unload").status_code == 200
    assert served.load("chained").status_code == 200 and served.data("doubled", X)[0] == 2
    for name in ("file:../x", "file:/etc/x", "file:1/../../x"):
        answer = served.load("doubled", config=config, **{name: ""})
        assert answer.status_code == 400 and "not within the model's folder" in answer.json()["error"], answer.text
    assert "files came without a config" in served.load("doubled", **file).json()["error"]
    assert "unknown parameter" in served.load("doubled", other="x").json()["error"]
    assert served.data("doubled", X)[0] == 2


def test_hostile_files_are_refused_by_name(served: Served) -> None:
    outside = files.model(
        [files.node("Mul", ["x", "w"], ["y"])],
        [("x", files.FLOAT, ("n", 4))],
        [("y", files.FLOAT, ("n", 4))],
        [files.external_weight("w", [4], "../../secret")],
    )
    nested = b""
    for _ in range(80):
        nested = files.part(1, files.part(5, files.part(6, nested)))
    custom = files.model([files.node("Evil", ["x"], ["y"])], [("x", 1, ("n",))], [("y", 1, ("n",))])
    for data, message in (
        (outside, "outside its folder"),
        (files.part(7, nested), "nested more than 64 deep"),
        (b"\xff" * 64, "no ONNX model"),
        (b"", "is empty"),
        (files.scale(1)[:-9], "cut off"),
        (custom, "Evil"),
    ):
        put(served.root, "hostile", data)
        answer = served.load("hostile")
        assert answer.status_code == 400 and message in answer.json()["error"], (message, answer.text)
    link = served.root / "hostile" / "1" / "model.onnx"
    link.unlink()
    link.symlink_to("/etc/hostname")
    assert "leads out of the model's folder" in served.load("hostile").json()["error"]


def test_a_process_that_is_killed_is_replaced(served: Served) -> None:
    (pid,) = children(served.server.process.pid)
    stop = threading.Event()
    statuses: list[int] = []

    def ask() -> None:
        while not stop.is_set():
            statuses.append(served.infer("doubled", X).status_code)

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(ask)
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: children(served.server.process.pid) not in ([], [pid]), "another process")
        wait_for(lambda: served.infer("addsub", *two()).status_code == 200, "the models to be loaded again")
        stop.set()
    assert set(statuses) <= {200, 503} and statuses[-1] == 200


def two() -> list[dict[str, Any]]:
    return [tensor("INPUT0", [1] * 4, [1, 4]), tensor("INPUT1", [1] * 4, [1, 4])]


def test_a_run_that_hangs_ends_with_an_error(served: Served) -> None:
    put(served.root, "hangs", files.spins(2_000_000_000), settings="hang-timeout: 1.0\nmax-batch-size: 0")
    config = served.load("hangs")
    assert config.status_code == 200, config.text
    began = time.monotonic()
    answer = served.infer("hangs", X)
    assert answer.status_code == 503 and "hang-timeout" in answer.json()["error"] and time.monotonic() - began < AT_ONCE
    served.load("hangs", "unload")
    wait_for(lambda: served.infer("doubled", X).status_code == 200, "the models to be loaded again")


def test_a_generation_file_says_what_is_loaded(served: Served) -> None:
    put(served.root, "listed", files.scale(3))
    names = [*sorted({name for (name, _), state in served.index().items() if state == "READY"}), "listed"]
    new = served.root / "generation.new"
    new.write_text(json.dumps(names))
    new.rename(served.root / "generation")
    wait_for(lambda: served.infer("listed", X).status_code == 200, "the model that the file lists")
    new.write_text(json.dumps(names[:-1]))
    new.rename(served.root / "generation")
    wait_for(lambda: served.infer("listed", X).status_code == 404, "the model to be unloaded")
    assert served.data("doubled", X)[0] == 2


def test_large_outputs_pass_beside_the_shared_memory(served: Served) -> None:
    put(served.root, "wide", files.identity(files.FLOAT))
    assert served.load("wide").status_code == 200
    count = 200_000
    data = np.arange(count, dtype=np.float32)
    message = MESSAGES["InferRequest"](model_name="wide")
    message.inputs.add(name="x", datatype="FP32", shape=[1, count])
    message.raw_input_contents.append(data.tobytes())
    with grpc.insecure_channel(
        f"127.0.0.1:{served.grpc_port}", options=[("grpc.max_receive_message_length", -1)]
    ) as channel:
        send = channel.unary_unary(
            f"/{INFERENCE}/ModelInfer", MESSAGES["InferRequest"].SerializeToString, MESSAGES["InferAnswer"].FromString
        )
        assert send(message, timeout=30).raw_output_contents[0] == data.tobytes()


def test_without_the_operators_key_nothing_is_loaded(tmp_path: Path) -> None:
    root = tmp_path / "models"
    put(root, "doubled", files.scale(2))
    flags = ("--repository", str(root), "--state-dir", "none", "--api-key", "user", "--admin-key", "boss")
    with serving(tmp_path / "log", *flags, model=None) as server:
        path = "/v2/repository/models/doubled/unload"
        for key, status in (("user", 401), ("boss", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.post(server.url + path, json={}, headers=headers, timeout=PATIENCE).status_code == status
        for path, status in (
            ("/v2/repository/mode%6cs/doubled/load", 403),
            ("/v2/systemsharedmemory/unregister", 401),
            ("/v2/system%73haredmemory/unregister", 403),
        ):
            headers = {"Authorization": "Bearer user"}
            assert httpx.post(server.url + path, json={}, headers=headers, timeout=PATIENCE).status_code == status


def test_strings_are_checked_before_the_queue(served: Served) -> None:
    url = served.server.url + "/v2/models/texts/infer"
    bad = struct.pack("<I", 2) + b"\xff\xfe"
    field = {"name": "x", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(bad)}}
    text = json.dumps({"inputs": [field]}).encode()
    answer = httpx.post(url, content=text + bad, headers={"Inference-Header-Content-Length": str(len(text))})
    assert answer.status_code == 400 and "not UTF-8" in answer.json()["error"]
    short = struct.pack("<I", 99) + b"a"
    field["parameters"] = {"binary_data_size": len(short)}
    text = json.dumps({"inputs": [field]}).encode()
    answer = httpx.post(url, content=text + short, headers={"Inference-Header-Content-Length": str(len(text))})
    assert answer.status_code == 400 and "in the middle of an element" in answer.json()["error"]


def test_many_models_need_few_threads(tmp_path: Path) -> None:
    for number in range(12):
        put(tmp_path / "models", f"m{number}", files.scale(number + 1))
    arguments = ("--repository", str(tmp_path / "models"), "--state-dir", "none")
    with serving(tmp_path / "log", *arguments, model=None) as server:
        x = tensor("x", [1.0] * 4, [1, 4])
        for number in range(12):
            answer = server.post(f"/v2/models/m{number}/infer", {"inputs": [x]})
            assert answer.json()["outputs"][0]["data"] == [number + 1.0] * 4
        processes = [server.process.pid, *children(server.process.pid)]
        threads = [len(os.listdir(f"/proc/{pid}/task")) for pid in processes]
        assert len(threads) == 2 and sum(threads) <= len(os.sched_getaffinity(0)) + 8
