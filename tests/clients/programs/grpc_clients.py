"""tritonclient[grpc] and grpcio-health-checking against a server. Run by test_grpc.py in an environment that has them;
its arguments are the address, the model, and what it shows: all, key, or until SIGTERM."""

import importlib.util
import json
import queue
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tritonclient.grpc as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

ADDRESS, MODEL = sys.argv[1], sys.argv[2]
PROMPT = "The capital of France is"


def tensor(name: str, value: Any) -> triton.InferInput:
    kind = "BOOL" if isinstance(value, bool) else "BYTES"
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(
        np.array([value] if kind == "BOOL" else [str(value).encode()], dtype=bool if kind == "BOOL" else np.object_)
    )
    return made


def inputs(text: str, *, stream: bool | None = None, **sampling: Any) -> list[triton.InferInput]:
    made = [tensor("text_input", text), tensor("sampling_parameters", json.dumps(sampling))]
    return made if stream is None else [*made, tensor("stream", stream)]


def text_of(result: Any) -> str:
    return result.as_numpy("text_output")[0].decode()


class Stream:
    """Collects the answers of a stream by id."""

    def __init__(self, client: Any, **options: Any) -> None:
        self.client = client
        self.got: queue.Queue[Any] = queue.Queue()
        client.start_stream(callback=lambda result, error: self.got.put((result, error)), **options)

    def until_final(self, ids: set[str]) -> dict[str, list[str]]:
        texts: dict[str, list[str]] = {id: [] for id in ids}
        while ids:
            result, error = self.got.get(timeout=60)
            assert error is None, error
            response = result.get_response()
            if response.outputs:
                texts[response.id].append(text_of(result))
            if response.parameters["triton_final_response"].bool_param:
                ids = ids - {response.id}
        return texts


OFFICIAL = {
    "Live": "ServerLiveResponse",
    "Ready": "ModelReadyResponse",
    "ModelName": "ModelReadyRequest",
    "Server": "ServerMetadataResponse",
    "Model": "ModelMetadataResponse",
    "ConfigAnswer": "ModelConfigResponse",
    "Repository": "RepositoryIndexRequest",
    "Index": "RepositoryIndexResponse",
    "Value": "InferParameter",
    "LoadedModel": "RepositoryModelLoadRequest",
    "Statistics": "ModelStatisticsResponse",
    "InferRequest": "ModelInferRequest",
    "InferAnswer": "ModelInferResponse",
    "StreamAnswer": "ModelStreamInferResponse",
    "Region": "SystemSharedMemoryRegisterRequest",
    "Regions": "SystemSharedMemoryStatusResponse",
    "CudaRegion": "CudaSharedMemoryRegisterRequest",
}


def is_repeated(field: Any) -> bool:
    """Older versions of protobuf have only labels, and newer ones have none."""
    return bool(field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED)


def shows_the_same_messages() -> None:
    """Every field of the server's messages is in tritonclient's, with the same number and type; those of nested ones,
    too."""
    path = Path(__file__).parents[3] / "src/penstock/frontend/kserve/grpc/messages.py"
    spec = importlib.util.spec_from_file_location("messages", path)
    ours = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(ours)
    left = [
        (ours.MESSAGES[name].DESCRIPTOR, getattr(service_pb2, official).DESCRIPTOR)
        for name, official in OFFICIAL.items()
    ]
    seen = set()
    while left:
        mine, official = left.pop()
        if mine.name in seen:
            continue
        seen.add(mine.name)
        for field in mine.fields:
            other = official.fields_by_name[field.name]
            assert (field.number, field.type, is_repeated(field)) == (other.number, other.type, is_repeated(other)), (
                other.full_name
            )
            if field.message_type is not None and (field.message_type.name, field.name) != ("Pair", "parameters"):
                left.append((field.message_type, other.message_type))
            elif field.message_type is not None:
                left.append((field.message_type, service_pb2.ModelInferRequest.ParametersEntry.DESCRIPTOR))
            if field.enum_type is not None:
                numbers = {value.name: value.number for value in field.enum_type.values}
                assert numbers == {value.name: value.number for value in other.enum_type.values}
    assert seen | {"Empty", "HealthRequest", "HealthAnswer"} == {*ours.MESSAGES}, seen


def shows_all(client: triton.InferenceServerClient) -> None:
    shows_the_same_messages()
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1") and not client.is_model_ready("llama")
    assert client.get_server_metadata().name == "penstock"
    metadata = client.get_model_metadata(MODEL)
    assert (metadata.name, metadata.outputs[0].name) == (MODEL, "text_output")
    assert [(i.name, i.datatype) for i in metadata.inputs][:2] == [
        ("text_input", "BYTES"),
        ("sampling_parameters", "BYTES"),
    ]
    config = client.get_model_config(MODEL).config
    assert config.model_transaction_policy.decoupled and config.input[0].data_type == 13 and config.max_batch_size == 0
    assert client.get_model_repository_index().models[0].state == "READY"
    assert client.get_inference_statistics(MODEL).model_stats[0].name == MODEL
    client.load_model(MODEL)
    fails(client.unload_model, "cannot be unloaded", MODEL)

    ask = partial(client.infer, MODEL, outputs=[triton.InferRequestedOutput("text_output")])
    answer = ask(inputs(PROMPT, max_tokens=12, temperature=0), request_id="7")
    whole = text_of(answer)
    assert "Paris" in whole and answer.get_response().id == "7"
    with_prompt = [*inputs(PROMPT, max_tokens=12, temperature=0), tensor("exclude_input_in_output", False)]
    assert text_of(ask(with_prompt)) == PROMPT + whole
    by_parameters = ask([tensor("text_input", PROMPT)], parameters={"max_tokens": 12, "temperature": 0.0})
    assert text_of(by_parameters) == whole
    done: queue.Queue[Any] = queue.Queue()
    client.async_infer(
        MODEL, inputs(PROMPT, max_tokens=12, temperature=0), lambda result, error: done.put((result, error))
    )
    assert text_of(done.get(timeout=60)[0]) == whole
    shows_errors(client)
    shows_streams(client, whole)
    shows_health()
    shows_deadlines_and_cancels(client)


def fails(call: Any, says: str, *arguments: Any, code: str = "", **more: Any) -> None:
    try:
        call(*arguments, **more)
    except InferenceServerException as error:
        shown = str(error)
    else:
        shown = "no error"
    assert says in shown and code in shown, shown


def shows_errors(client: triton.InferenceServerClient) -> None:
    ask = partial(fails, client.infer)
    ask("'llama' is not served here", "llama", inputs(PROMPT), code="NOT_FOUND")
    ask("version '2' is not served", MODEL, inputs(PROMPT), model_version="2", code="NOT_FOUND")
    assert not client.is_model_ready(MODEL, "2")
    ask("text_input is missing", MODEL, [tensor("sampling_parameters", "{}")], code="INVALID_ARGUMENT")
    ask("input 'x' is unknown", MODEL, [tensor("text_input", "a"), tensor("x", "a")], code="INVALID_ARGUMENT")
    ask("one text", MODEL, [_two("text_input")], code="INVALID_ARGUMENT")
    ask("unknown parameter 'max_token'", MODEL, inputs(PROMPT, max_token=3), code="INVALID_ARGUMENT")
    ask("output 'x' is unknown", MODEL, inputs(PROMPT), outputs=[triton.InferRequestedOutput("x")])
    ask("larger than max", MODEL, [tensor("text_input", "x" * (5 << 20))], code="RESOURCE_EXHAUSTED")
    broken = triton.InferInput("text_input", [1], "BYTES")
    broken._raw_content = b"\x09\0\0\0abc"
    ask("ends in the middle", MODEL, [broken], code="INVALID_ARGUMENT")
    broken._raw_content = b"\x02\0\0\0\xff\xfe"
    ask("not UTF-8", MODEL, [broken], code="INVALID_ARGUMENT")


def _two(name: str) -> triton.InferInput:
    made = triton.InferInput(name, [2], "BYTES")
    made.set_data_from_numpy(np.array([b"a", b"b"], dtype=np.object_))
    return made


def shows_streams(client: triton.InferenceServerClient, whole: str) -> None:
    stream = Stream(client)
    for id in "abc":
        client.async_stream_infer(
            MODEL,
            inputs(PROMPT, stream=True, max_tokens=12, temperature=0),
            request_id=id,
            enable_empty_final_response=True,
        )
    client.async_stream_infer(MODEL, inputs(PROMPT, stream=False, max_tokens=12, temperature=0), request_id="whole")
    got = stream.until_final({"a", "b", "c", "whole"})
    assert got.pop("whole") == [whole]
    for texts in got.values():
        # On a busy machine some pieces come together.
        assert len(texts) > 1 and "".join(texts) == whole, (texts, whole)
    client.async_stream_infer("llama", inputs(PROMPT, stream=True), request_id="wrong")
    _, error = stream.got.get(timeout=60)
    assert "'llama' is not served here" in str(error)
    client.async_stream_infer(MODEL, inputs(PROMPT, stream=False, max_tokens=12, temperature=0), request_id="after")
    assert stream.until_final({"after"}) == {"after": [whole]}
    client.stop_stream()


def shows_health() -> None:
    with grpc.insecure_channel(ADDRESS) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "inference.GRPCInferenceService"):
            assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
        assert next(health.Watch(health_pb2.HealthCheckRequest())).status == 1
        assert next(health.Watch(health_pb2.HealthCheckRequest(service="x"))).status == 3
        unknown = health.Check.future(health_pb2.HealthCheckRequest(service="x"))
        assert unknown.exception().code() is grpc.StatusCode.NOT_FOUND


LONG = {"max_tokens": 4000, "temperature": 0, "ignore_eos": True}


def shows_deadlines_and_cancels(client: triton.InferenceServerClient) -> None:
    """test_grpc.py checks that the engine runs nothing afterwards."""
    # The client and the server have the same deadline; either may be the first to say so.
    fails(client.infer, "DEADLINE_EXCEEDED", MODEL, inputs(PROMPT, **LONG), client_timeout=1.0)
    done: queue.Queue[Any] = queue.Queue()
    call = client.async_infer(MODEL, inputs(PROMPT, **LONG), lambda result, error: done.put(error))
    time.sleep(0.5)
    call.cancel()
    assert "cancelled" in str(done.get(timeout=20)).lower()
    stream = Stream(client)
    client.async_stream_infer(MODEL, inputs(PROMPT, stream=True, **LONG), request_id="a")
    assert stream.got.get(timeout=20)[1] is None
    client.stop_stream(cancel_requests=True)


def shows_key(client: triton.InferenceServerClient) -> None:
    """The server's key is `secret`. Health needs none."""
    assert client.is_server_live() and client.is_server_ready()
    fails(client.get_model_metadata, "API key", MODEL, code="UNAUTHENTICATED")
    fails(client.infer, "API key", MODEL, inputs(PROMPT), code="UNAUTHENTICATED")
    fails(client.infer, "API key", MODEL, inputs(PROMPT), headers={"authorization": "Bearer wrong"})
    headers = {"authorization": "Bearer secret"}
    assert client.is_model_ready(MODEL, headers=headers)
    assert text_of(client.infer(MODEL, inputs(PROMPT, max_tokens=2), headers=headers))
    stream = Stream(client, headers=headers)
    client.async_stream_infer(MODEL, inputs(PROMPT, stream=False, max_tokens=2), request_id="a")
    assert len(stream.until_final({"a"})["a"]) == 1
    client.stop_stream()


def shows_drain(client: triton.InferenceServerClient) -> None:
    """A request in flight ends, new ones are refused, and the stream is closed."""
    stream = Stream(client)
    fields = inputs(PROMPT, stream=True, max_tokens=150, ignore_eos=True)
    client.async_stream_infer(MODEL, fields, request_id="a", enable_empty_final_response=True)
    assert stream.got.get(timeout=60)[1] is None
    watched: queue.Queue[int] = queue.Queue()
    threading.Thread(target=_watch, args=(watched,), daemon=True).start()
    assert watched.get(timeout=20) == 1
    print("stop", flush=True)  # test_grpc.py sends SIGTERM
    assert watched.get(timeout=20) == 2
    fails(client.infer, "shutting down", MODEL, inputs(PROMPT), code="UNAVAILABLE")
    assert stream.until_final({"a"})["a"]
    client.stop_stream()


def _watch(watched: "queue.Queue[int]") -> None:
    with grpc.insecure_channel(ADDRESS) as channel:
        try:
            for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                watched.put(answer.status)
        except grpc.RpcError:
            pass


if __name__ == "__main__":
    with triton.InferenceServerClient(ADDRESS) as opened:
        {"all": shows_all, "key": shows_key, "drain": shows_drain}[sys.argv[3]](opened)
