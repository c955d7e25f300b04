"""tritonclient over HTTP, gRPC and asyncio with the one-shot models of a repository. Run by test_triton_repository.py:
python triton_repository.py HTTP_ADDRESS GRPC_ADDRESS"""

import asyncio
import json
import queue
import sys

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

HTTP, GRPC = sys.argv[1:]
A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = np.ones((2, 4), np.float32)


def inputs(module, **how):  # type: ignore[no-untyped-def]
    made = []
    for name, array in (("INPUT0", A), ("INPUT1", B)):
        tensor = module.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array, **how)
        made.append(tensor)
    return made


def right(result) -> None:  # type: ignore[no-untyped-def]
    assert (result.as_numpy("OUTPUT0") == A + B).all() and (result.as_numpy("OUTPUT1") == A - B).all()


def refusal(call) -> str:  # type: ignore[no-untyped-def]
    try:
        call()
    except InferenceServerException as error:
        return str(error)
    raise AssertionError("nothing was refused")


def over_http() -> None:
    client = tritonclient.http.InferenceServerClient(HTTP, concurrency=4)
    assert client.is_model_ready("addsub") and client.get_model_metadata("addsub")["inputs"][0]["shape"] == [-1, 4]
    assert client.get_model_config("addsub")["max_batch_size"] == 8
    right(client.infer("addsub", inputs(tritonclient.http)))
    right(client.infer("addsub", inputs(tritonclient.http, binary_data=False), model_version="1", request_id="7"))
    asked = [tritonclient.http.InferRequestedOutput("OUTPUT0", binary_data=binary) for binary in (True, False)]
    for output in asked:
        found = client.infer("addsub", inputs(tritonclient.http), outputs=[output])
        assert (found.as_numpy("OUTPUT0") == A + B).all() and found.get_output("OUTPUT1") is None
    best = tritonclient.http.InferRequestedOutput("OUTPUT0", class_count=1)
    found = client.infer("addsub", inputs(tritonclient.http), outputs=[best]).as_numpy("OUTPUT0")
    assert [each.split(b":")[1:] for each in found.ravel()] == [[b"3"], [b"3"]], found
    right(client.async_infer("addsub", inputs(tritonclient.http)).get_result())
    words = tritonclient.http.InferInput("x", [2], "BYTES")
    words.set_data_from_numpy(np.array(["a", "ünï"], dtype=object))
    assert client.infer("texts", [words]).as_numpy("y").tolist() == [b"a", "ünï".encode()]
    client.unload_model("doubled")
    assert not client.is_model_ready("doubled")
    client.load_model("doubled")
    client.load_model("doubled", config=json.dumps({"backend": "onnxruntime", "max_batch_size": 4}))
    assert client.get_model_config("doubled")["max_batch_size"] == 4
    assert {row["name"]: row.get("state") for row in client.get_model_repository_index()}["doubled"] == "READY"
    stats = client.get_inference_statistics("addsub")["model_stats"][0]
    assert stats["inference_count"] >= 10 and stats["batch_stats"][0]["batch_size"] == 2
    assert "nowhere" in refusal(lambda: client.load_model("nowhere"))


def over_grpc() -> None:
    client = tritonclient.grpc.InferenceServerClient(GRPC)
    assert client.is_model_ready("addsub") and not client.is_model_ready("addsub", "9")
    assert client.get_model_config("addsub").config.dynamic_batching.max_queue_delay_microseconds == 1000
    right(client.infer("addsub", inputs(tritonclient.grpc), request_id="x", priority=1, timeout=5_000_000))
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(5):
        client.async_stream_infer("addsub", inputs(tritonclient.grpc), request_id=str(number))
    client.stop_stream()
    found = [answers.get(timeout=20) for _ in range(5)]
    assert all(error is None for _, error in found)
    assert {result.get_response().id for result, _ in found} == {str(number) for number in range(5)}
    client.unload_model("doubled")
    client.load_model("doubled")
    assert client.get_inference_statistics("addsub").model_stats[0].execution_count > 0
    refused = refusal(lambda: client.infer("addsub", inputs(tritonclient.grpc)[:1]))
    assert "INVALID_ARGUMENT" in refused and "missing required input(s) ['INPUT1']" in refused


async def at_once() -> None:
    http, grpc = tritonclient.http.aio.InferenceServerClient(HTTP), tritonclient.grpc.aio.InferenceServerClient(GRPC)
    for client, module in ((http, tritonclient.http), (grpc, tritonclient.grpc)):
        for result in await asyncio.gather(*(client.infer("addsub", inputs(module)) for _ in range(20))):
            right(result)
        await client.close()


over_http()
over_grpc()
asyncio.run(at_once())
print("passed")
