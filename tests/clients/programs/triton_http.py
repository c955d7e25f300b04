"""tritonclient over HTTP: health, metadata, statistics and inference.

Run by test_matrix.py in an environment of its own; its arguments are in arguments.py."""

import numpy
import tritonclient.http
from arguments import MODEL, SERVER


def with_triton() -> None:
    client = tritonclient.http.InferenceServerClient(SERVER.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert client.get_model_metadata(MODEL)["name"] == MODEL and client.get_server_metadata()["name"] == "penstock"
    assert client.get_model_repository_index()[0]["state"] == "READY"
    assert client.get_inference_statistics(MODEL)["model_stats"]
    client.load_model(MODEL)
    text = tritonclient.http.InferInput("text_input", [1], "BYTES")
    text.set_data_from_numpy(numpy.array([b"The capital of France is"], dtype=object), binary_data=False)
    wanted = [tritonclient.http.InferRequestedOutput("text_output", binary_data=False)]
    result = client.infer(MODEL, [text], outputs=wanted, parameters={"max_tokens": 12, "temperature": 0})
    assert "Paris" in str(result.as_numpy("text_output")[0])


with_triton()
