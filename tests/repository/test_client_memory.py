"""Clients of one-shot models pass tensors in shared memory."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.frontend.errors import APIError
from penstock.frontend.kserve.shared_memory import ClientMemory, RegionFields, check_size, shared_part
from tests.e2e.server import serving
from tests.ports import free_port
from tests.repository import onnx_files as files
from tests.repository.onnx_files import put
from tests.repository.served import Served

pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")

from penstock.frontend.kserve.grpc.messages import MESSAGES


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    put(tmp_path / "models", "addsub", files.add_sub())
    port = free_port()
    flags = ("--repository", str(tmp_path / "models"), "--grpc-port", str(port), "--state-dir", "none")
    with serving(tmp_path / "log", *flags, "--client-shared-memory", "8MiB", model=None) as server:
        yield Served(server, tmp_path / "models", port)


@pytest.fixture
def memory() -> Iterator[Path]:
    """A file of 1 KiB in the folder of shared memory."""
    path = Path("/dev/shm") / f"penstock-test-{os.getpid()}"
    path.write_bytes(bytes(1024))
    yield path
    path.unlink()


def in_memory(region: str, offset: int, size: int) -> dict[str, Any]:
    return {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size}


def test_tensors_pass_in_shared_memory(served: Served, memory: Path) -> None:
    a, b = np.arange(4, dtype=np.float32), np.ones(4, np.float32)
    with memory.open("r+b") as file:
        file.write(bytes(64) + a.tobytes() + b.tobytes())
    routes, fields = "/v2/systemsharedmemory", {"key": f"/{memory.name}", "offset": 64, "byte_size": 128}
    for region in ("over HTTP", "other"):
        answer = served.server.post(f"{routes}/region/{region}/register", fields)
        assert answer.status_code == 200, answer.text
    assert [each["name"] for each in served.server.get(routes + "/status").json()] == ["over HTTP", "other"]
    assert served.server.get(routes + "/region/other/status").json() == [{"name": "other", **fields}]
    assert "already in manager" in served.server.post(f"{routes}/region/other/register", fields).text
    assert "system_shared_memory" in served.server.get("/v2").json()["extensions"]

    inputs = [
        {"name": f"INPUT{i}", "datatype": "FP32", "shape": [1, 4], "parameters": in_memory("other", 16 * i, 16)}
        for i in (0, 1)
    ]
    outputs = [{"name": "OUTPUT1", "parameters": in_memory("over HTTP", 32, 16)}, {"name": "OUTPUT0"}]
    answer = served.infer("addsub", *inputs, outputs=outputs)
    assert answer.status_code == 200, answer.text
    sent, placed = answer.json()["outputs"]
    assert placed == {"name": "OUTPUT1", "datatype": "FP32", "shape": [1, 4]}  # as Triton's HTTP server answers
    assert sent["data"] == (a + b).tolist()
    assert np.frombuffer(memory.read_bytes()[96:112], np.float32).tolist() == (a - b).tolist()

    message = MESSAGES["InferRequest"](model_name="addsub")
    message.inputs.add(name="INPUT0", datatype="FP32", shape=[1, 4])
    second = message.inputs.add(name="INPUT1", datatype="FP32", shape=[1, 4])
    output = message.outputs.add(name="OUTPUT0")
    for tensor_of, where in ((second, in_memory("other", 16, 16)), (output, in_memory("other", 48, 64))):
        for name, value in where.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(tensor_of.parameters.add(key=name).value, kind, value)
    message.raw_input_contents.append((a * 2).tobytes())
    (made,) = served.call("ModelInfer", "InferRequest", "InferAnswer", message).outputs
    assert {pair.key: pair.value.int64_param for pair in made.parameters}["shared_memory_byte_size"] == 16
    assert np.frombuffer(memory.read_bytes()[112:128], np.float32).tolist() == (a * 2 + b).tolist()

    outputs = [{"name": "OUTPUT0", "parameters": in_memory("other", 48, 8)}]
    assert "at least 16 bytes" in served.infer("addsub", *inputs, outputs=outputs).json()["error"]
    os.truncate(memory, 80)
    answer = served.infer("addsub", *inputs)
    assert answer.status_code == 400 and "has been made shorter" in answer.json()["error"]
    removed = served.call("SystemSharedMemoryUnregister", "Region", "Empty", MESSAGES["Region"](name="other"))
    assert not removed.ByteSize()
    assert "register it first" in served.infer("addsub", *inputs).json()["error"]
    assert served.server.post(routes + "/unregister", {}).status_code == 200
    assert served.server.get(routes + "/status").json() == []
    assert served.server.get("/v2/cudasharedmemory/status").json() == []
    assert served.server.post("/v2/cudasharedmemory/region/x/register", {}).status_code == 400


def test_regions_are_checked(memory: Path) -> None:
    regions = ClientMemory(2048)
    link, pipe = memory.with_suffix(".link"), memory.with_suffix(".pipe")
    link.symlink_to(memory)
    os.mkfifo(pipe)
    before = len(os.listdir("/proc/self/fd"))
    try:
        for key, size, message in (
            ("../etc/passwd", 1, "must be the name of a file in /dev/shm"),
            ("a/b", 1, "must be the name"),
            ("..", 1, "must be the name"),
            ("", 1, "must be the name"),
            ("/penstock-test-nothing", 1, "No such file or directory; create it first"),
            (link.name, 1, "Too many levels of symbolic links"),
            (pipe.name, 1, "has 0 bytes"),
            (memory.name, 1025, "has 1024 bytes; check offset and byte_size"),
            (memory.name, 4096, r"the limit is 2048 \(--client-shared-memory\): unregister others, or raise it"),
        ):
            with pytest.raises(APIError, match=message):
                regions.register("r", RegionFields(key, size))
    finally:
        link.unlink()
        pipe.unlink()
    assert len(os.listdir("/proc/self/fd")) == before  # nothing that was refused stays open
    regions.register("r", RegionFields(memory.name, 512, 512))
    for offset, size in ((0, 513), (512, 1), (-1, 2), (0, None), (2**70, 0)):
        with pytest.raises(APIError, match="Invalid offset"):
            regions.part("r", offset, size)
    part = regions.part("r", 0, 4)
    with pytest.raises(APIError, match="--max-body-size"):
        check_size([part, None, part], 7)
    regions.unregister("r")
    with pytest.raises(APIError, match="has been unregistered"):
        part.read()
    with pytest.raises(APIError, match="start the server with --client-shared-memory"):
        shared_part(None, {"shared_memory_region": "r"})
