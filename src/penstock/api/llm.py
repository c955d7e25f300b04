"""An engine in this process, for scripts."""

import asyncio
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar, cast

from penstock.api.async_llm import AsyncLLM, Messages, Prompt
from penstock.api.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from penstock.api.params import SamplingParams
from penstock.api.tokenizer import ChatTokenizer
from penstock.messages import EngineInfo
from penstock.observe.progress import progress_bar

T = TypeVar("T")
_Start = Callable[[int], AsyncGenerator[RequestOutput, None]]  # begins the request of the prompt with this index


class LLM:
    """A model and its engine, which runs on a thread of this process until `close`, or until the object is deleted."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Starts an engine. `model` and `settings` are those of `penstock serve`, with underscores: `max_model_len`.

        Raises ValueError for a model or a setting that is wrong, and EngineError if the engine does not start.
        """
        self._loop = _Loop()
        try:
            self._llm = self._loop.run(AsyncLLM.start(model, **settings))
        except BaseException:
            self._loop.stop()
            raise
        self._finalizer = weakref.finalize(self, _close, self._loop, self._llm)

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine: its model, what it can hold, and its memory."""
        return self._llm.info

    def get_tokenizer(self) -> ChatTokenizer:
        """The model's tokenizer; its `apply_chat_template` is that of transformers."""
        return self._llm.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The values that the model recommends, which `generate` and `chat` use for what is left out."""
        return self._llm.default_sampling_params

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """The outputs of each prompt, in order. All are generated together, as many at a time as the engine holds.

        `sampling_params` is one for all prompts, or one for each. `use_tqdm` shows a progress bar on a terminal. Raises
        ValueError for a prompt that cannot be generated from; the others are then abandoned.
        """
        wanted = cast(Sequence[Prompt], [prompts] if _is_one_prompt(prompts) else prompts)
        params = _for_each(sampling_params, len(wanted))
        return self._collect(lambda i: self._llm.generate(wanted[i], params[i]), len(wanted), "generating", use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """The answers to one conversation, or to each of several; see `generate` and `AsyncLLM.chat`."""
        one = bool(messages) and isinstance(messages[0], dict)
        wanted = cast(Sequence[Messages], [messages] if one else messages)
        params = _for_each(sampling_params, len(wanted))
        return self._collect(
            lambda i: self._llm.chat(wanted[i], params[i], **options), len(wanted), "answering", use_tqdm
        )

    def stream(
        self, prompt: Prompt | Messages, sampling_params: SamplingParams | None = None, **options: Any
    ) -> Iterator[str]:
        """Yields the text of one output as it grows: of a prompt, or of a conversation with the `options` of `chat`.

        Ending the iteration early aborts the request.
        """
        if _is_one_prompt(prompt):
            results = self._llm.generate(cast(Prompt, prompt), sampling_params)
        else:
            results = self._llm.chat(cast(Messages, prompt), sampling_params, **options)
        shown = 0
        try:
            while (result := self._loop.run(anext(results, None))) is not None:
                text = result.outputs[0].text
                if text[shown:]:
                    yield text[shown:]
                shown = len(text)
        finally:
            self._loop.run(results.aclose())

    def embed(self, texts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """The embeddings of texts, in their order. Raises ValueError, also if the model gives none."""
        wanted = cast(Sequence[Prompt], [texts] if _is_one_prompt(texts) else texts)
        with progress_bar("embedding", len(wanted), wanted=use_tqdm) as advance:
            return self._loop.run(self._llm.embed(wanted, advance))

    def classify(self, texts: str | Sequence[str], *, use_tqdm: bool = True) -> list[ClassificationRequestOutput]:
        """The probability of each class for each text. Raises ValueError, also if the model is no classifier."""
        wanted = [texts] if isinstance(texts, str) else texts
        with progress_bar("classifying", len(wanted), wanted=use_tqdm) as advance:
            return self._loop.run(self._llm.classify(wanted, advance))

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, use_tqdm: bool = True
    ) -> list[ScoringRequestOutput]:
        """How well each of `text_2` fits `text_1`; see `AsyncLLM.score`."""
        count = 1 if isinstance(text_2, str) else len(text_2)
        with progress_bar("scoring", count, wanted=use_tqdm) as advance:
            return self._loop.run(self._llm.score(text_1, text_2, advance))

    def close(self) -> None:
        """Ends the engine and gives back its memory."""
        self._finalizer()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, start: _Start, count: int, what: str, shown: bool) -> list[RequestOutput]:
        with progress_bar(what, count, wanted=shown) as advance:
            return self._loop.run(_all_of(start, count, 2 * self.info.max_num_seqs, advance))


async def _all_of(start: _Start, count: int, at_once: int, advance: Callable[[int], None]) -> list[RequestOutput]:
    """The finished results of `count` requests, of which `at_once` are sent to the engine at a time."""
    results: list[RequestOutput | None] = [None] * count
    order = iter(range(count))

    async def work() -> None:
        for i in order:
            async for result in start(i):
                results[i] = result
            advance(1)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(at_once, count)):
            group.create_task(work())
    return [result for result in results if result is not None]


class _Loop:
    """An event loop on a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Returns the result of `work`. An interrupt of the caller cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException as error:
            future.cancel()
            if isinstance(error, ExceptionGroup):  # several requests failed: the first says enough
                raise error.exceptions[0] from None
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _close(loop: _Loop, llm: AsyncLLM) -> None:
    try:
        loop.run(llm.close())
    finally:
        loop.stop()


def _is_one_prompt(prompts: object) -> bool:
    """Whether it is one prompt: a text, token ids, or one of vLLM's dictionaries. Token ids may be those of NumPy or
    torch, whose arrays also have integers as items."""
    if isinstance(prompts, (str, dict)):
        return True
    if (dimensions := getattr(prompts, "ndim", None)) is not None:
        return bool(dimensions == 1)
    if not isinstance(prompts, Sequence) or not prompts:
        return False
    return hasattr(prompts[0], "__index__") and not getattr(prompts[0], "ndim", 0)


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not all(isinstance(each, SamplingParams) for each in params):
        raise TypeError("sampling_params must be SamplingParams, or a list of them; SamplingParams(**values) makes one")
    if len(params) != count:
        raise ValueError(f"sampling_params has {len(params)} entries for {count} prompts; give one for each, or one")
    return params
