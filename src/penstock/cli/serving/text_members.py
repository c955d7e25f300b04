"""Language models, embedders and tokenizers as members of a pipeline: texts, token ids and vectors go in and out."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
import numpy as np
import orjson

from penstock.frontend import APIError
from penstock.frontend.local import LocalRequests
from penstock.frontend.offload import offload_if_large
from penstock.frontend.versions.serving import Serving
from penstock.messages import EngineError, RequestRejected
from penstock.messages.arrays import read_array, tensor_of
from penstock.messages.tensors import InferRequest, InferResult, Tensor, TensorSpec
from penstock.text import Tokenizer, TokenizerError

TEXTS = TensorSpec("text_input", "BYTES", (-1, 1), optional=True)  # either these, or ids
SAMPLING = TensorSpec("sampling_parameters", "BYTES", (-1, 1), optional=True)  # a JSON object, which holds for all rows
TEXT_OUT = TensorSpec("text_output", "BYTES", (-1, 1))
VECTOR_OUT = TensorSpec("embedding", "FP32", (-1, -1))
TEXT = TensorSpec("text", "BYTES", (-1, 1))
IDS = TensorSpec("input_ids", "INT64", (-1, -1))  # zeros fill rows up to the longest
MASK = TensorSpec("attention_mask", "INT64", (-1, -1))  # 1 for tokens, 0 for what fills a row
_IDS_IF_ANY, _MASK_IF_ANY = (msgspec.structs.replace(each, optional=True) for each in (IDS, MASK))  # as inputs
MAX_TOKENIZED = 1 << 20  # bytes of texts or ids that a step converts


class TextMember:
    """See `penstock.messages.tensors.MemberModel`. Each row of a request is a text, or its token ids, and joins the
    engine's batch."""

    def __init__(self, serving: Serving, requests: LocalRequests) -> None:
        """`requests` answers requests of OpenAI's wire."""
        self._pools = serving.model.pooling is not None
        self._requests, self._name = requests, serving.model.name
        self.streams = not self._pools
        inputs = (TEXTS, _IDS_IF_ANY, _MASK_IF_ANY)
        self.inputs = inputs if self._pools else (*inputs, SAMPLING)
        self.outputs = (VECTOR_OUT,) if self._pools else (TEXT_OUT,)

    async def infer(self, request: InferRequest) -> InferResult:
        """Continues the texts, or embeds them. Raises RequestRejected and EngineError."""
        texts, sampling = self._read(request)
        path = "/v1/embeddings" if self._pools else "/v1/completions"
        body = {"input": texts} if self._pools else {**sampling, "prompt": texts}
        answer = await self._requests.answer(path, orjson.dumps({**body, "model": self._name}))
        fields = orjson.loads(answer.body)
        if answer.status >= 400:
            raise self._error(answer.status, fields["error"]["message"])
        if self._pools:
            vectors = np.array([row["embedding"] for row in fields["data"]], np.float32)
            return InferResult(outputs=[tensor_of(VECTOR_OUT.name, "FP32", vectors)])
        return InferResult(outputs=[_texts(TEXT_OUT.name, [choice["text"] for choice in fields["choices"]])])

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        """Yields the continuation of one text in pieces. Raises as `infer`."""
        texts, sampling = self._read(request)
        if self._pools or len(texts) != 1:
            raise RequestRejected(f"step {self._name!r} has {len(texts)} rows; a stream has one row; send one")
        body = orjson.dumps({**sampling, "model": self._name, "prompt": texts})
        try:
            async with aclosing(self._requests.stream("/v1/completions", body)) as pieces:
                async for piece in pieces:
                    yield InferResult(outputs=[_texts(TEXT_OUT.name, [piece])], final=False)
        except APIError as error:
            raise self._error(error.status, error.message) from error
        yield InferResult(outputs=[])

    def _read(self, request: InferRequest) -> tuple[list[Any], dict[str, Any]]:
        """The texts or lists of token ids, and the sampling parameters. Raises RequestRejected."""
        given = {tensor.name: tensor for tensor in request.inputs}
        if (TEXTS.name in given) == (IDS.name in given):
            raise RequestRejected(f"step {self._name!r} needs {TEXTS.name} or {IDS.name}, and not both")
        sampling = {}
        if SAMPLING.name in given and (how := _elements(given[SAMPLING.name])):
            try:
                sampling = orjson.loads(how[0])
            except orjson.JSONDecodeError as error:
                raise RequestRejected(f"{SAMPLING.name} of step {self._name!r} is not valid JSON: {error}") from None
            if not isinstance(sampling, dict) or sampling.get("n", 1) != 1:
                raise RequestRejected(f"{SAMPLING.name} of step {self._name!r} must be a JSON object, with n=1")
        return _read_ids(given) if IDS.name in given else _elements(given[TEXTS.name]), sampling

    def _error(self, status: int, message: str) -> Exception:
        return (EngineError if status >= 500 else RequestRejected)(f"step {self._name!r}: {message}")


class TokenizerMember:
    """See `penstock.messages.tensors.MemberModel`. Texts become token ids, or ids become texts."""

    streams = False

    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        """`kind` is that of a step: tokenize or detokenize."""
        self._tokenizer, self._encodes = tokenizer, kind == "tokenize"
        self.inputs: tuple[TensorSpec, ...] = (TEXT,) if self._encodes else (_IDS_IF_ANY, _MASK_IF_ANY)
        self.outputs: tuple[TensorSpec, ...] = (IDS, MASK) if self._encodes else (TEXT,)

    async def infer(self, request: InferRequest) -> InferResult:
        """Returns a row for each text, or a text for each row. Raises RequestRejected."""
        given = {tensor.name: tensor for tensor in request.inputs}
        size = sum(len(tensor.data) for tensor in request.inputs)
        if size > MAX_TOKENIZED or (IDS.name not in given and not self._encodes):
            raise RequestRejected(f"a step with a tokenizer takes 1 to {MAX_TOKENIZED} bytes; it got {size}: send less")
        work: Callable[[Any], Any] = self._tokenizer.encode if self._encodes else self._tokenizer.decode
        rows = _elements(given[TEXT.name]) if self._encodes else _read_ids(given)
        try:
            made = await offload_if_large(partial(_each, work, rows), size)
        except TokenizerError as error:
            raise RequestRejected(f"the tokenizer refuses a row: {error}") from None
        if not self._encodes:
            return InferResult(outputs=[_texts(TEXT.name, made)])
        ids = np.zeros((len(made), max(map(len, made), default=0)), np.int64)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(made):
            ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
        return InferResult(outputs=[tensor_of(IDS.name, "INT64", ids), tensor_of(MASK.name, "INT64", mask)])

    async def stream(self, request: InferRequest) -> AsyncGenerator[InferResult, None]:
        yield await self.infer(request)


def _each(work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [work(item) for item in items]


def _elements(tensor: Tensor) -> list[Any]:
    """Raises RequestRejected for texts that are not UTF-8."""
    try:
        found: list[Any] = read_array(tensor.data, tensor.datatype, tensor.shape).reshape(-1).tolist()
    except UnicodeDecodeError:
        raise RequestRejected(f"a text of {tensor.name!r} is not UTF-8; send text in UTF-8") from None
    return found


def _read_ids(given: dict[str, Tensor]) -> list[list[int]]:
    """The token ids of each row, without those that the mask leaves out. Raises RequestRejected."""
    ids = read_array(given[IDS.name].data, "INT64", given[IDS.name].shape)
    if MASK.name not in given:
        rows: list[list[int]] = ids.tolist()
        return rows
    if given[MASK.name].shape != ids.shape:
        raise RequestRejected(f"{MASK.name} has the shape {given[MASK.name].shape}, but {IDS.name} {ids.shape}")
    mask = read_array(given[MASK.name].data, "INT64", ids.shape)
    return [row[keep != 0].tolist() for row, keep in zip(ids, mask, strict=True)]


def _texts(name: str, texts: Sequence[str]) -> Tensor:
    return tensor_of(name, "BYTES", np.array(texts, dtype=object).reshape(-1, 1))
