"""An empty service: grpc.aio on uvloop that answers each ModelInfer with the same bytes, and computes nothing.

python grpc_floor.py PORT WIDTH prints a line when it is ready. Requests and answers have a row of WIDTH float32. What a
call costs here, no server on grpc.aio can save. It runs in Penstock's environment.
"""

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio
import uvloop

from penstock.frontend.kserve.grpc.messages import INFERENCE, MESSAGES

port, width = map(int, sys.argv[1:])
metadata = MESSAGES["Model"](name="matmul", versions=["1"], platform="onnxruntime_onnx")
metadata.inputs.add(name="x", datatype="FP32", shape=[-1, width])
answer = MESSAGES["InferAnswer"](model_name="matmul", model_version="1", raw_output_contents=[bytes(4 * width)])
answer.outputs.add(name="y", datatype="FP32", shape=[1, width])
ANSWERS = {"ModelMetadata": metadata.SerializeToString(), "ModelInfer": answer.SerializeToString()}


def method(name: str) -> Any:
    async def run(request: bytes, context: Any) -> bytes:
        return ANSWERS[name]

    return grpc.unary_unary_rpc_method_handler(run)


async def main() -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(INFERENCE, {name: method(name) for name in ANSWERS})]
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


uvloop.run(main())
