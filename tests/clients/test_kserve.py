"""KServe's wire with SmolLM2: health, metadata, generate and infer."""

import json
from typing import Any

import pytest

from tests.e2e.server import Server

MODEL = "/v2/models/smollm2"
ASK = {"text_input": "The capital of France is", "parameters": {"max_tokens": 12, "temperature": 0}}


def test_health_and_metadata(server: Server) -> None:
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
        assert server.get(path).status_code == 200
    assert "generate" in server.get("/v2").json()["extensions"]
    for path in (MODEL, f"{MODEL}/versions/1"):
        metadata = server.get(path).json()
        assert metadata["name"] == "smollm2" and metadata["outputs"][0]["name"] == "text_output"
    assert server.post("/v2/repository/index", {}).json()[0]["state"] == "READY"
    assert server.post("/v2/repository/models/smollm2/load", {}).status_code == 200
    assert server.post("/v2/repository/models/smollm2/unload", {}).status_code == 403


def test_text_and_its_stream_are_the_same(server: Server) -> None:
    whole = server.post(f"{MODEL}/generate", ASK).json()
    assert (whole["model_name"], whole["model_version"]) == ("smollm2", "1") and "Paris" in whole["text_output"]
    beside = {"text_input": ASK["text_input"], "max_tokens": 12, "temperature": 0, "id": "7"}
    assert server.post(f"{MODEL}/versions/1/generate", beside).json() == {**whole, "id": "7"}
    stream = server.post(f"{MODEL}/generate_stream", ASK)
    assert stream.headers["content-type"].startswith("text/event-stream") and stream.text.endswith("\n\n")
    events = [json.loads(event.removeprefix("data: ")) for event in stream.text.split("\n\n")[:-1]]
    assert len(events) > 1 and "".join(event["text_output"] for event in events) == whole["text_output"]
    echo = {**ASK, "exclude_input_in_output": False}
    assert server.post(f"{MODEL}/generate", echo).json()["text_output"] == ASK["text_input"] + whole["text_output"]


def tensor(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [1], "data": [text]}


def test_infer(server: Server) -> None:
    whole = server.post(f"{MODEL}/generate", ASK).json()
    for body in (
        {"inputs": [tensor("text_input", ASK["text_input"])], "parameters": ASK["parameters"]},
        {
            "inputs": [
                tensor("text_input", ASK["text_input"]),
                tensor("sampling_parameters", json.dumps(ASK["parameters"])),
            ]
        },
    ):
        answer = server.post(f"{MODEL}/infer", {**body, "id": "x"}).json()
        assert answer["id"] == "x" and answer["outputs"] == [tensor("text_output", whole["text_output"])]


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/models/llama/generate", ASK, 404, "'llama' is not served here"),
        (f"{MODEL}/versions/2/generate", ASK, 404, "version '2' is not served"),
        (f"{MODEL}/generate", {"text_input": "x", "max_tokens": 1, "parameters": {"max_tokens": 2}}, 400, "differ"),
        (f"{MODEL}/generate", {"text_input": "x", "parameters": {"max_token": 2}}, 400, "'parameters.max_token'"),
        (f"{MODEL}/infer", {"inputs": []}, 400, "text_input is missing"),
        (f"{MODEL}/infer", {"inputs": [{**tensor("text_input", "x"), "data": ["x", "y"]}]}, 400, "one text"),
        (f"{MODEL}/infer", {"inputs": [tensor("x", "x")]}, 400, "input 'x' is unknown"),
    ],
)
def test_errors(server: Server, path: str, body: dict[str, Any], status: int, message: str) -> None:
    answer = server.post(path, body)
    assert answer.status_code == status and message in answer.json()["error"]
