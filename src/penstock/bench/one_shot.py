"""Requests for one-shot models over KServe's protocol: tensors of one row, as binary data."""

import math
import struct
import time
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from penstock.bench.online import LIST_SECONDS, Send, authorization, error_of
from penstock.bench.timeline import Timeline
from penstock.bench.workload import WorkloadRequest
from penstock.messages.tensors import DATATYPES

MAX_BYTES = 64 << 20  # of a request
_TEXT = b"The river flows"  # each element of a BYTES tensor


class UnsuitableModel(ValueError):
    """The model is not there, or no request for it can be made."""


async def one_shot(url: str, model: str, api_key: str | None) -> Send:
    """Returns what sends a request to a model: zeros or short texts, in the shapes of its metadata with 1 for any size.

    Raises aiohttp.ClientError, TimeoutError and UnsuitableModel.
    """
    address = f"{url}/v2/models/{quote(model)}"
    timeout = aiohttp.ClientTimeout(total=LIST_SECONDS)
    async with (
        aiohttp.ClientSession(headers=authorization(api_key), timeout=timeout) as session,
        session.get(address) as answer,
    ):
        if answer.status == 404:
            raise UnsuitableModel(f"--model is {model!r}: {error_of(await answer.read())}")
        answer.raise_for_status()
        inputs = (await answer.json())["inputs"]
    tensors: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for each in inputs:
        shape = [max(size, 1) for size in each["shape"]]
        element = bytes(DATATYPES[each["datatype"]]) or struct.pack("<I", len(_TEXT)) + _TEXT
        size = len(element) * math.prod(shape)
        if size > MAX_BYTES:
            raise UnsuitableModel(
                f"--model is {model!r}: input {each['name']!r} has {size} bytes; the limit is {MAX_BYTES}"
            )
        tensors.append({**each, "shape": shape, "parameters": {"binary_data_size": size}})
        parts.append(element * math.prod(shape))
    head = orjson.dumps({"inputs": tensors, "parameters": {"binary_data_output": True}})
    body, headers = b"".join((head, *parts)), {"Inference-Header-Content-Length": str(len(head))}

    async def send(session: aiohttp.ClientSession, item: WorkloadRequest) -> Timeline:
        line = Timeline(time.perf_counter())
        try:
            async with session.post(f"{address}/infer", data=body, headers=headers) as answer:
                found = await answer.read()
            line.stamps.append((time.perf_counter(), 1))
            if answer.status != 200:
                line.error = f"status {answer.status}: {error_of(found)}"
        except (aiohttp.ClientError, TimeoutError) as error:
            line.error = f"{type(error).__name__}: {error}"
        return line

    return send
