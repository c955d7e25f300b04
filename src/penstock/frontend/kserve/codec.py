"""Encodes answers as Triton does."""

from typing import Any

import orjson

from penstock.frontend.answer import Codec, CollectedChoice
from penstock.frontend.errors import APIError
from penstock.frontend.generation import ChoiceUpdate, Usage
from penstock.frontend.http.sse import sse_event
from penstock.frontend.kserve.errors import error_body

FINAL = "triton_final_response"  # the parameter of a stream's last answer


class GenerateCodec(Codec):
    """Encodes answers of generate: the whole text, or in a stream the text of each event."""

    def __init__(self, head: dict[str, Any], echo: str) -> None:
        """`head` are the fields before the text. `echo` is put before the text."""
        self._head = head
        self._echo = echo

    def opening(self, usage: Usage) -> bytes:
        return sse_event(self._encode(self._echo)) if self._echo else b""

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        """An event with new text. The last one may have none."""
        last = update.finish_reason is not None
        return sse_event(self._encode(update.text, last=last)) if update.text or last else b""

    def failure(self, error: APIError) -> bytes:
        return sse_event(error_body(error))

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        return self._encode(self._echo + answers[0].text)

    def _encode(self, text: str, *, last: bool = False) -> bytes:
        return orjson.dumps({**self._head, "text_output": text})


class InferCodec(GenerateCodec):
    """Encodes answers of infer, whose text is a tensor."""

    def _encode(self, text: str, *, last: bool = False) -> bytes:
        fields = {**self._head, "parameters": {FINAL: True}} if last else self._head
        output = {"name": "text_output", "datatype": "BYTES", "shape": [1], "data": [text]}
        return orjson.dumps({**fields, "outputs": [output]})
