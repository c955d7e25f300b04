"""An engine in this process, for asyncio."""

import base64
import logging
import operator
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import orjson
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from penstock.api.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OutputBuilder,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from penstock.api.params import SamplingParams
from penstock.api.tokenizer import ChatTokenizer
from penstock.api.vllm_arguments import GPU_ONLY, without_vllms
from penstock.config.wrong_setting import LIBRARY
from penstock.engine.launch import launch
from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import APIError
from penstock.frontend.generation import Generation
from penstock.frontend.limits import RequestLimits
from penstock.frontend.openai import embeddings, read_chat, read_completion
from penstock.frontend.registry import ModelRegistry
from penstock.frontend.rerank import classify, score
from penstock.frontend.served import ServedModel
from penstock.frontend.versions.serving import Serving, Version
from penstock.messages import EngineInfo
from penstock.observe.metrics import Metrics
from penstock.prepare.device import detect_device
from penstock.prepare.engine import verified
from penstock.prepare.model import find_given, prepare_found, read_given
from penstock.prepare.served import served_model
from penstock.weights.manifest import ManifestCheck

# A text, token ids, or vLLM's forms: {"prompt": text} and {"prompt_token_ids": ids}.
Prompt = str | Sequence[int] | Mapping[str, Any]
Advance = Callable[[int], None]
_Reader = Callable[[bytes, RequestContext], Awaitable[Call]]
_Route = Callable[[bytes, RequestContext], Awaitable[bytes]]
Messages = Sequence[Mapping[str, Any]]  # as in OpenAI's chat API


def _nothing(done: int) -> None:
    """Shows no progress."""


class AsyncLLM:
    """A model and its engine, which runs on a thread of this process. `await AsyncLLM.start(...)` makes one."""

    def __init__(self, model: ServedModel, limits: RequestLimits, seed: int | None) -> None:
        self._model = model
        self._limits = limits
        self._seed = seed
        self._models = ModelRegistry(Serving(model, Metrics(CollectorRegistry())))

    @classmethod
    async def start(cls, model: str | None = None, **settings: Any) -> "AsyncLLM":
        """Starts an engine. `model` and `settings` are those of `penstock serve`, with underscores: `max_model_len`.

        Arguments of vLLM that Penstock does not need are taken (`vllm_arguments.py`). Raises ValueError for a model or
        a setting that is wrong, and EngineError if the engine does not start.
        """
        found = find_given(read_given(model, without_vllms(settings), LIBRARY))
        hardware = detect_device(found.given.settings.device)
        if hardware.device == "cpu":
            found = found.changed(LIBRARY, **dict.fromkeys(GPU_ONLY))
        prepared = prepare_found(found, hardware)
        resolved = prepared.resolved
        logging.getLogger("penstock").addHandler(logging.NullHandler())  # errors are raised: their log is for servers
        # These limits protect a server from its clients. Here the caller itself holds all prompts and answers.
        engine = replace(resolved.engine, log_level="warning", max_waiting_tokens=2**62)
        client = await verified(launch(engine, in_process=True), ManifestCheck(prepared.path))
        served = served_model(prepared.answers, client)
        limits = replace(RequestLimits.of(resolved.server), max_answer_bytes=2**60)
        return cls(served, limits, resolved.server.seed)

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine: its model, what it can hold, and its memory."""
        return self._model.client.info

    @property
    def tokenizer(self) -> ChatTokenizer:
        return ChatTokenizer(self._model.tokenizer, self._model.chat_format)

    async def get_tokenizer(self) -> ChatTokenizer:
        """The same, as vLLM's AsyncLLM has it."""
        return self.tokenizer

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The values that the model recommends. They apply to what a request leaves out."""
        defaults: Mapping[str, Any] = self._model.defaults
        return SamplingParams(**defaults)

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the outputs of a prompt as they grow: the same object each time, with more in it.

        Ending the iteration early aborts the request. Raises ValueError for what cannot be generated.
        """
        sampling_params = sampling_params or SamplingParams()
        text, content = _content(prompt)
        fields = {"prompt": content, **sampling_params.request_fields(chat=False)}
        async for result in self._run(read_completion, fields, request_id, text):
            yield result

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the answers to a conversation as they grow; see `generate`.

        `options` are fields of OpenAI's API: `tools`, `tool_choice`, `chat_template_kwargs`, ... The text is what the
        model writes, tool calls and reasoning included.
        """
        sampling_params = sampling_params or SamplingParams()
        fields = {"messages": list(messages), **sampling_params.request_fields(chat=True), **options}
        async for result in self._run(read_chat, fields, request_id, None):
            yield result

    async def embed(self, texts: Sequence[Prompt], advance: Advance = _nothing) -> list[EmbeddingRequestOutput]:
        """Returns the embeddings of texts, in order. Raises ValueError, also if the model has no embeddings.

        `advance` is called with the number of texts done since the last call.
        """
        inputs = [_content(text)[1] for text in texts]
        found = self._in_parts(embeddings, {"input": inputs}, advance, encoding_format="base64")
        return [
            EmbeddingRequestOutput(EmbeddingOutput(np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist()))
            async for entry in found
        ]

    async def classify(self, texts: Sequence[str], advance: Advance = _nothing) -> list[ClassificationRequestOutput]:
        """Returns the probability of each class for each of `texts`, in order; see `embed`. For classifiers."""
        found = self._in_parts(classify, {"input": list(texts)}, advance)
        return [
            ClassificationRequestOutput(ClassificationOutput(entry["probs"], entry["label"])) async for entry in found
        ]

    async def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], advance: Advance = _nothing
    ) -> list[ScoringRequestOutput]:
        """Returns how well each of `text_2` fits `text_1`, which is one text for all of them, or one for each.

        The score is a cross-encoder's, or else the cosine of the embeddings. See `embed`.
        """
        first, second = ([text] if isinstance(text, str) else list(text) for text in (text_1, text_2))
        if len(first) not in (1, len(second)):
            raise ValueError(f"text_1 has {len(first)} texts and text_2 {len(second)}; give one text_1, or as many")
        first *= len(second) // max(len(first), 1)
        found = self._in_parts(score, {"text_1": first, "text_2": second}, advance)
        return [ScoringRequestOutput(ScoringOutput(entry["score"])) async for entry in found]

    async def _in_parts(
        self, route: _Route, lists: Mapping[str, list[Any]], advance: Advance, **fields: Any
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yields the entries of the answers to `lists`, each cut into parts as long as a request may be."""
        count, most = len(next(iter(lists.values()))), self._limits.max_inputs
        for start in range(0, count, most):
            part = {name: entries[start : start + most] for name, entries in lists.items()}
            answer = await self._answer(route, {**part, **fields})
            for entry in answer["data"]:
                yield entry
            advance(len(answer["data"]))

    async def _answer(self, route: _Route, fields: dict[str, Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = orjson.loads(await route(_body(fields), self._context(None)))
        except APIError as error:
            raise ValueError(error.message) from None
        return answer

    def _context(self, request_id: str | None) -> RequestContext:
        return RequestContext(
            models=self._models,
            enter=self._current,
            limits=self._limits,
            id=secrets.token_hex(12) if request_id is None else request_id,
            created=int(time.time()),
            seed=self._seed,
        )

    async def _current(self, name: str | None) -> Version:
        """Nothing is reloaded here, so the version stays."""
        return self._models.find(name).version

    async def _run(
        self, read: _Reader, fields: dict[str, Any], request_id: str | None, text: str | None
    ) -> AsyncGenerator[RequestOutput, None]:
        if self._model.pooling is not None:
            raise ValueError(f"{self._model.name} gives vectors, not text: use embed or score")
        context = self._context(request_id)
        try:
            call = await read(_body(fields), context)
        except APIError as error:
            raise ValueError(error.message) from None
        [part] = call.parts
        model, metrics = call.context.model, call.context.metrics
        generation = Generation(model, call.parts, metrics, call.operation, time.monotonic())
        built = OutputBuilder(context.id, text, part, model.tokenizer)
        updates = generation.updates()
        async with aclosing(updates):
            async for update in updates:
                built.add(update)
                built.result.num_cached_tokens = generation.usage.cached_tokens
                yield built.result

    async def close(self) -> None:
        """Ends the engine and all requests in it."""
        await self._models.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _body(fields: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ValueError(f"the request cannot be written as JSON: {error}") from None


def _content(prompt: Prompt) -> tuple[str | None, str | list[int]]:
    """Returns the text of a prompt, or None, and the `prompt` of a request: the text or token ids."""
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        return _content(prompt.get("prompt", "") if ids is None else ids)
    if isinstance(prompt, str):
        return prompt, prompt
    values = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # of NumPy or torch
    try:
        return None, [operator.index(value) for value in values]
    except TypeError:
        raise ValueError(f"a prompt is a text or token ids, which are integers, not {str(values)[:80]}") from None
