"""A public ONNX model through the public client: Silero's voice activity detector (MIT), by tritonclient.

pip install --no-deps silero-vad tritonclient geventhttpclient gevent greenlet zope.event zope.interface brotli
python-rapidjson: the model's package is never imported, its code needs torchaudio.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.server import serving
from tests.ports import free_port
from tests.repository.onnx_files import put

onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'penstock[onnx]'")
pytest.importorskip("grpc", reason="pip install 'penstock[grpc]'")
http = pytest.importorskip("tritonclient.http", reason="pip install tritonclient[http,grpc]")
rpc = pytest.importorskip("tritonclient.grpc", reason="pip install tritonclient[http,grpc]")

RATE = 16_000
WINDOW, CONTEXT = 512, 64  # samples of a call, and of the call before it


def model_file() -> Path:
    try:
        return Path(str(distribution("silero-vad").locate_file("silero_vad/data/silero_vad.onnx")))
    except PackageNotFoundError:
        pytest.skip("pip install --no-deps silero-vad")


def windows() -> Any:
    """Two seconds: noise, a buzz with the formants of a vowel, noise."""
    time = np.arange(2 * RATE) / RATE
    random = np.random.default_rng(0)
    buzz = sum(
        np.exp(-(((120 * k - formant) / 120) ** 2)) * np.sin(2 * np.pi * 120 * k * time + k)
        for k in range(1, 30)
        for formant in (700, 1200, 2500)
    )
    samples = (0.002 * random.standard_normal(len(time)) + 0.2 * buzz * (abs(time - 1) < 0.4)).astype(np.float32)
    padded = np.concatenate([np.zeros(CONTEXT, np.float32), samples])
    return [padded[at : at + WINDOW + CONTEXT][None] for at in range(0, len(samples) - WINDOW + 1, WINDOW)]


def by_client(triton: Any, address: str) -> list[float]:
    """The probabilities of speech that a server gives; the state goes with each request."""
    client, found = triton.InferenceServerClient(address), []
    state = np.zeros((2, 1, 128), np.float32)
    metadata = client.get_model_metadata("vad")
    names = [each["name"] if isinstance(each, dict) else each.name for each in _of(metadata, "inputs")]
    assert names == ["input", "state", "sr"]
    for window in windows():
        inputs = []
        for name, array, datatype in zip(
            names, (window, state, np.array(RATE, np.int64)), ("FP32", "FP32", "INT64"), strict=True
        ):
            given = triton.InferInput(name, list(array.shape), datatype)
            given.set_data_from_numpy(array)
            inputs.append(given)
        answer = client.infer("vad", inputs)
        state = answer.as_numpy("stateN")
        found.append(float(answer.as_numpy("output")[0, 0]))
    return found


def _of(message: Any, name: str) -> Any:
    return message[name] if isinstance(message, dict) else getattr(message, name)


def test_silero_by_tritonclient(tmp_path: Path) -> None:
    file = model_file()
    put(tmp_path / "models", "vad", file.read_bytes(), settings="max-batch-size: 0")
    session, state, expected = onnxruntime.InferenceSession(str(file)), np.zeros((2, 1, 128), np.float32), []
    for window in windows():
        output, state = session.run(None, {"input": window, "state": state, "sr": np.array(RATE, np.int64)})
        expected.append(float(output[0, 0]))
    assert max(expected) > 5 * expected[2] and min(expected) < 0.1, "it hears the buzz, and not the noise"
    port = free_port()
    flags = ("--repository", str(tmp_path / "models"), "--grpc-port", str(port), "--state-dir", "none")
    with serving(tmp_path / "log", *flags, model=None) as server:
        for triton, address in ((http, server.url[7:]), (rpc, f"127.0.0.1:{port}")):
            assert np.allclose(by_client(triton, address), expected, rtol=0, atol=1e-6)
