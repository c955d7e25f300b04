"""Language models and embedders as members of an ensemble: texts go in, and texts or vectors come out."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from penstock.frontend.local import LocalRequests
from penstock.frontend.versions.serving import Serving
from penstock.messages import EngineError, RequestRejected
from penstock.messages.tensors import LENGTH_BYTES, InferRequest, InferResult, Tensor, TensorSpec, strings

TEXTS = TensorSpec("text_input", "BYTES", (-1, 1))
SAMPLING = TensorSpec("sampling_parameters", "BYTES", (-1, 1), optional=True)  # a JSON object, which holds for all rows
TEXT_OUT = TensorSpec("text_output", "BYTES", (-1, 1))
VECTOR_OUT = TensorSpec("embedding", "FP32", (-1, -1))


class TextMember:
    """See `penstock.messages.tensors.TensorModel`. Each row of a request is a text, which joins the engine's batch."""

    version = "1"
    labels: Mapping[str, Sequence[str]] = {}

    def __init__(self, serving: Serving, requests: LocalRequests) -> None:
        """`requests` answers requests of OpenAI's wire."""
        self._pools = serving.model.pooling is not None
        self._requests = requests
        self.name = serving.model.name
        self.inputs: tuple[TensorSpec, ...] = (TEXTS,) if self._pools else (TEXTS, SAMPLING)
        self.outputs = (VECTOR_OUT,) if self._pools else (TEXT_OUT,)

    async def infer(self, request: InferRequest) -> InferResult:
        """Continues the texts, or embeds them. Raises RequestRejected and EngineError."""
        given = {tensor.name: list(strings(tensor.data, tensor.name)) for tensor in request.inputs}
        try:
            texts = [str(part, "utf-8") for part in given[TEXTS.name]]
            sampling = orjson.loads(given[SAMPLING.name][0]) if given.get(SAMPLING.name) else {}
        except (UnicodeDecodeError, orjson.JSONDecodeError) as error:
            raise RequestRejected(f"the texts of step {self.name!r} cannot be read: {error}") from None
        if self._pools:
            rows = (await self._ask("/v1/embeddings", {"model": self.name, "input": texts}))["data"]
            vectors = [row["embedding"] for row in rows]
            shape = (len(vectors), len(vectors[0]))
            data = b"".join(struct.pack(f"<{shape[1]}f", *vector) for vector in vectors)
            return InferResult(outputs=[Tensor(VECTOR_OUT.name, "FP32", shape, data)])
        answer = await self._ask("/v1/completions", {**sampling, "model": self.name, "prompt": texts})
        made = [choice["text"].encode() for choice in answer["choices"]]
        packed = b"".join(b"%b%b" % (len(text).to_bytes(LENGTH_BYTES, "little"), text) for text in made)
        return InferResult(outputs=[Tensor(TEXT_OUT.name, "BYTES", (len(made), 1), packed)])

    async def _ask(self, path: str, body: dict[str, Any]) -> Any:
        """Returns the fields of an answer. Raises RequestRejected and EngineError."""
        answer = await self._requests.answer(path, orjson.dumps(body))
        fields = orjson.loads(answer.body)
        if answer.status >= 500:
            raise EngineError(f"step {self.name!r}: {fields['error']['message']}")
        if answer.status >= 400:
            raise RequestRejected(f"step {self.name!r}: {fields['error']['message']}")
        return fields

    def metadata(self) -> dict[str, Any]:
        """Nothing: clients read a language model's own routes."""
        return {}

    def config(self) -> dict[str, Any]:
        """Nothing, as for `metadata`."""
        return {}

    def statistics(self) -> dict[str, Any]:
        """Nothing, as for `metadata`."""
        return {}
