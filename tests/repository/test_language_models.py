"""Language models in a repository: one server chats, embeds and runs ONNX models, each in a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serving
from tests.engine.processes import children
from tests.patience import PATIENCE, wait_for
from tests.ports import free_port
from tests.repository import onnx_files as files
from tests.repository.onnx_files import put

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
SMALL = "settings: {max-num-seqs: 4, kv-cache-memory: 32MiB, threads: 1}\n"

WRITES = """
max-batch-size: 4
inputs: [{name: TEXT, datatype: BYTES, dims: [1]}, {name: HOW, datatype: BYTES, dims: [1], optional: true}]
outputs: [{name: OUT, datatype: BYTES, dims: [1]}]
steps:
  - {model: same, inputs: {x: TEXT}, outputs: {y: prompt}}
  - {model: writer, inputs: {text_input: prompt, sampling_parameters: HOW}, outputs: {text_output: OUT}}
"""
ANSWERS = """
max-batch-size: 4
inputs: [{name: TEXT, datatype: BYTES, dims: [1]}, {name: HOW, datatype: BYTES, dims: [1], optional: true}]
outputs:
  - {name: ANSWER, datatype: BYTES, dims: [1]}
  - {name: VECTOR, datatype: FP32, dims: [384]}
  - {name: BACK, datatype: BYTES, dims: [1]}
steps:
  - {detokenize: writer, inputs: {input_ids: ids, attention_mask: mask}, outputs: {text: BACK}}
  - model: writer
    inputs: {input_ids: ids, attention_mask: mask, sampling_parameters: HOW}
    outputs: {text_output: ANSWER}
  - {tokenize: writer, inputs: {text: TEXT}, outputs: {input_ids: ids, attention_mask: mask}}
  - switch: length(TEXT) > 5
    then: [{model: embedder, inputs: {text_input: ANSWER}, outputs: {embedding: VECTOR}}]
    else: [{model: embedder, inputs: {text_input: TEXT}, outputs: {embedding: VECTOR}}]
"""
RANKS = """
max-batch-size: 4
inputs: [{name: TEXT, datatype: BYTES, dims: [1]}]
outputs: [{name: OUT, datatype: FP32, dims: [384]}]
steps:
  - {model: embedder, inputs: {text_input: TEXT}, outputs: {embedding: vector}}
  - {model: halved, inputs: {x: vector}, outputs: {y: OUT}}
"""
COUNTS = """
max-batch-size: 4
inputs: [{name: TEXT, datatype: BYTES, dims: [1]}]
outputs: [{name: OUT, datatype: INT64, dims: [-1]}]
steps:
  - {tokenize: writer, inputs: {text: TEXT}, outputs: {input_ids: ids}}
  - {model: copied, inputs: {x: ids}, outputs: {y: OUT}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("repository")
    for name, model in (("writer", "python-8m"), ("embedder", "all-minilm-l6-v2")):
        (found / name).mkdir()
        (found / name / "model.yaml").write_text(f"model: {model}\n{SMALL}")
    put(found, "doubled", files.scale(2))
    put(found, "same", files.identity(files.STRING, ("n", "m")))
    put(found, "halved", files.scale(0.5, width=384))
    put(found, "copied", files.identity(files.INT64, ("n", "m")))
    for name, steps in (("writes", WRITES), ("ranks", RANKS), ("answers", ANSWERS), ("counts", COUNTS)):
        (found / name).mkdir()
        (found / name / "model.yaml").write_text(steps)
    (found / "wrong").mkdir()
    (found / "wrong" / "model.yaml").write_text("model: python-8m\nsettings: {port: 3}\n")
    return found


@pytest.fixture(scope="module")
def grpc_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def server(root: Path, grpc_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--repository", str(root), "--grpc-port", str(grpc_port), "--state-dir", "none")
    with serving(log, *flags, model=None) as running:
        yield running


def complete(server: Server, model: str | None = "writer") -> httpx.Response:
    named = {} if model is None else {"model": model}
    return server.post("/v1/completions", {**named, "prompt": "def add(a, b):", "max_tokens": 4})


def embed(server: Server) -> httpx.Response:
    return server.post("/v1/embeddings", {"model": "embedder", "input": "water"})


def test_one_server_writes_embeds_and_infers(server: Server) -> None:
    assert complete(server).json()["usage"]["completion_tokens"] == 4
    assert len(embed(server).json()["data"][0]["embedding"]) == 384
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    infer = server.post("/v2/models/doubled/infer", {"inputs": [tensor]})
    assert infer.json()["outputs"][0]["data"] == [2, 4, 6, 8]
    generate = server.post("/v2/models/writer/generate", {"text_input": "x =", "max_tokens": 2})
    assert generate.json()["model_name"] == "writer"
    assert complete(server, None).status_code == 200  # the model that generates, without a name
    assert {model["id"] for model in server.get("/v1/models").json()["data"]} == {"writer", "embedder"}
    assert len(children(server.process.pid)) == 3
    wrong = complete(server, "doubled")
    assert wrong.status_code == 404 and "'doubled' is not served here" in wrong.json()["error"]["message"]


def test_a_pipeline_of_a_language_model_and_of_an_embedder(server: Server) -> None:
    how = '{"max_tokens": 4, "temperature": 0}'
    inputs = [
        {"name": name, "datatype": "BYTES", "shape": [2, 1], "data": data}
        for name, data in (("TEXT", ["def add(a, b):", "x ="]), ("HOW", [how, how]))
    ]
    found = server.post("/v2/models/writes/infer", {"inputs": inputs})
    assert found.status_code == 200, found.text
    body = {"model": "writer", "prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    assert found.json()["outputs"][0]["data"][0] == alone and found.json()["outputs"][0]["shape"] == [2, 1]
    text = [{"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["water"]}]
    halves = server.post("/v2/models/ranks/infer", {"inputs": text}).json()["outputs"][0]["data"]
    vector = embed(server).json()["data"][0]["embedding"]
    assert halves == pytest.approx([value / 2 for value in vector], rel=1e-5)
    ids = server.post("/v2/models/counts/infer", {"inputs": text}).json()["outputs"][0]["data"]
    assert ids == server.post("/tokenize", {"model": "writer", "prompt": "water"}).json()["tokens"]


def test_a_pipeline_streams_the_text_of_a_language_model(server: Server) -> None:
    how = json.dumps({"max_tokens": 48, "temperature": 0})

    def inputs(*texts: str) -> list[dict[str, Any]]:
        given = (("TEXT", list(texts)), ("HOW", [how] * len(texts)))
        return [{"name": name, "datatype": "BYTES", "shape": [len(texts), 1], "data": data} for name, data in given]

    texts = ("def add(a, b):", "x =")
    answer = server.post("/v2/models/answers/infer", {"inputs": inputs(*texts)})
    assert answer.status_code == 200, answer.text
    whole, vector, back = (output["data"] for output in answer.json()["outputs"])
    assert back == list(texts) and len(vector) == 2 * 384
    for text, found in zip(texts, whole, strict=True):
        body = {"model": "writer", "prompt": text, "max_tokens": 48, "temperature": 0}
        assert server.post("/v1/completions", body).json()["choices"][0]["text"] == found

    lines = server.post("/v2/models/answers/infer_stream", {"inputs": inputs(texts[0])}).text.split("\n\n")
    *pieces, last = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    assert "".join(piece["outputs"][0]["data"][0] for piece in pieces) == whole[0] and len(pieces) > 1
    assert last["parameters"] == {"triton_final_response": True}
    assert [output["name"] for output in last["outputs"]] == ["VECTOR", "BACK"]
    refused = server.post("/v2/models/answers/infer_stream", {"inputs": inputs(*texts)})
    assert refused.status_code == 400 and "a stream has one row" in refused.json()["error"]


def test_a_pipeline_streams_over_grpc(server: Server, grpc_port: int) -> None:
    grpc = pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")
    from penstock.frontend.kserve.grpc.messages import INFERENCE, MESSAGES
    from penstock.messages.arrays import pack_strings

    request = MESSAGES["InferRequest"](model_name="answers", id="7")
    for name, text in (("TEXT", b"def add(a, b):"), ("HOW", b'{"max_tokens": 48, "temperature": 0}')):
        request.inputs.add(name=name, datatype="BYTES", shape=[1, 1])
        request.raw_input_contents.append(pack_strings([text]))
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
        call = channel.stream_stream(
            f"/{INFERENCE}/ModelStreamInfer",
            MESSAGES["InferRequest"].SerializeToString,
            MESSAGES["StreamAnswer"].FromString,
        )
        *pieces, last = list(call(iter([request]), timeout=PATIENCE))
    assert not last.error_message and len(pieces) > 1
    assert [len(piece.infer_response.outputs) for piece in pieces] == [1] * len(pieces)
    assert [output.name for output in last.infer_response.outputs] == ["VECTOR", "BACK"]
    assert last.infer_response.parameters[0].value.bool_param and last.infer_response.id == "7"


def test_a_setting_of_the_server_is_refused_by_name(server: Server) -> None:
    rows = {row["name"]: row for row in server.post("/v2/repository/index", {}).json()}
    assert rows["writer"]["state"] == rows["embedder"]["state"] == "READY"
    answer = server.post("/v2/repository/models/wrong/load", {})
    assert answer.status_code == 400 and "port: it is a setting of the server" in answer.json()["error"]


def test_an_engine_comes_and_goes_beside_the_others(server: Server, root: Path) -> None:
    before = set(children(server.process.pid))
    assert server.post("/v2/repository/models/writer/unload", {}).status_code == 200
    assert complete(server).status_code == 404 and embed(server).status_code == 200
    wait_for(lambda: len(children(server.process.pid)) == 2, "the engine to end")
    assert 'model_name="writer"' not in server.get("/metrics").text
    assert server.post("/v2/repository/models/writer/load", {}).status_code == 200
    assert complete(server).status_code == 200 and set(children(server.process.pid)) != before
    text = (root / "writer" / "model.yaml").read_text()
    (root / "writer" / "model.yaml").write_text(text.replace("max-num-seqs: 4", "max-num-seqs: 2"))
    assert server.post("/v2/repository/models/writer/load", {}).status_code == 200
    assert 'penstock_max_num_seqs{model_name="writer"} 2.0' in server.get("/metrics").text
    assert complete(server).status_code == 200
    wait_for(lambda: len(children(server.process.pid)) == 3, "the engine before to end")
    (root / "writer" / "model.yaml").write_text("model: nowhere-at-all\n")
    answer = server.post("/v2/repository/models/writer/load", {})
    assert answer.status_code == 400 and complete(server).status_code == 200
    (root / "writer" / "model.yaml").write_text(text)


def test_a_model_beside_a_repository(tmp_path: Path, root: Path) -> None:
    flags = ("--repository", str(root), "--load-model", "doubled", "--state-dir", "none", "--kv-cache-memory", "32MiB")
    with serving(tmp_path / "log", *flags, "--max-num-seqs", "4") as server:
        assert complete(server, "python-8m").status_code == 200
        assert server.post("/v2/repository/models/python-8m/load", {}).status_code == 400
        names = {row["name"]: row.get("state") for row in server.post("/v2/repository/index", {}).json()}
        assert names == {
            "python-8m": "READY",
            "doubled": "READY",
            "writer": None,
            "embedder": None,
            "wrong": None,
        } | dict.fromkeys(("same", "halved", "copied", "writes", "ranks", "answers", "counts"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--repository", "/nowhere"), "there is no such folder"),
        (("--load-model", "x"), "there is no --repository"),
        (
            ("--repository", ".", "--client-shared-memory", "1MiB", "--api-processes", "2"),
            "--client-shared-memory (command line) works with one API process",
        ),
    ],
)
def test_wrong_flags(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    import subprocess
    import sys

    command = [sys.executable, "-m", "penstock", "serve", *flags, "--port", "0", "--state-dir", "none"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert made.returncode != 0 and message in made.stderr and "Traceback" not in made.stderr, made.stderr
