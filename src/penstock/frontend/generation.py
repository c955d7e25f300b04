"""Runs the prompts of one call on the engine and turns their tokens into text. Independent of the wire."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, cast

import msgspec

from penstock.config.tenants.entries import PriceEntry
from penstock.frontend.errors import APIError, GenerationFailed
from penstock.frontend.requests.context_policy import LeftOut
from penstock.frontend.served import ServedModel
from penstock.messages import EngineError, FinishReason, GenerateRequest, RequestRejected, TokenDelta, row_size
from penstock.observe.model_metrics import ModelMetrics
from penstock.observe.tracing import RequestTrace
from penstock.text import OutputText

_FAILED = ("error", "abort")
_SHOWN_REASONS = 8  # choices whose finish reasons the log shows


class PromptPart(msgspec.Struct, frozen=True):
    """The part of a call that comes from one prompt: the engine's request, and how its output becomes text."""

    request: GenerateRequest
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the text includes the stop string or stop token that ended it
    skip_special_tokens: bool = True
    shown: frozenset[int] = frozenset()  # special tokens that are not skipped
    prompt_only: bool = False  # no output was requested; the engine's one token is dropped
    left_out: LeftOut = LeftOut()  # what became of messages, if there were too many


class ChoiceUpdate(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice. The last update of a choice has a finish reason."""

    choice: int  # prompt's index x n + index of the choice for that prompt
    text: str
    tokens: int  # tokens of the choice so far
    logprobs: bytes  # packed rows, one for each new token
    offsets: tuple[int, ...]  # for each of those rows: where its token begins in the choice's text
    finish_reason: FinishReason | None
    prompt_logprobs: bytes  # packed rows, in the first update of each choice if requested
    token_ids: tuple[int, ...]  # the new tokens; those beyond `tokens` are not part of the choice
    stopped: str | None = None  # the stop string that ended the choice


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    left_out: LeftOut = LeftOut()
    first_token_seconds: float = 0.0  # from the call's arrival to its first token
    reasoning_tokens: int | None = None  # set by the codec of a model that reasons
    price: PriceEntry | None = None  # by which the answer says what it cost; None: it does not say it


class Updates(Protocol):
    """The output of one call, wherever it is generated. See Generation."""

    request_id: str
    usage: Usage

    def updates(self, gather: int = 1) -> AsyncGenerator[ChoiceUpdate, None]: ...
    def shown(self) -> dict[str, Any]: ...


class _ChoiceState:
    __slots__ = ("characters", "ended", "first", "index", "last", "text", "tokens")

    def __init__(self, index: int, text: OutputText) -> None:
        self.index = index
        self.text = text
        self.tokens = 0
        self.characters = 0  # of text sent so far
        self.first = 0.0  # when its first token and its last token arrived
        self.last = 0.0
        self.ended = False


class _Progress:
    __slots__ = ("choices", "held", "open", "part", "prompt_logprobs", "unfinished")

    def __init__(self, part: PromptPart, choices: list[_ChoiceState]) -> None:
        self.part = part
        self.choices = choices
        self.unfinished = len(choices)
        self.open = False  # the prompt's logprobs have arrived, if requested
        self.prompt_logprobs = b""
        self.held: list[TokenDelta] = []  # deltas of other choices that arrived before the prompt's logprobs


class Generation:
    """Yields the updates of all prompts of one call.

    `operation` names the kind of call in metrics. `start` is the time on `clock` when the call was received. Choices
    are numbered prompt by prompt. `request_id` is for the log, `trace` takes what a trace of the request has.
    """

    def __init__(
        self,
        model: ServedModel,
        parts: Sequence[PromptPart],
        metrics: ModelMetrics,
        operation: str,
        start: float,
        request_id: str = "",
        trace: RequestTrace | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = request_id
        self._trace = trace
        if trace is not None:
            trace.call(operation, model.name, [part.request for part in parts])
        self._client = model.client
        self._metrics = metrics
        self._operation = operation
        self._clock = clock
        self._start = start
        self._model = model.name
        self._reasons: list[FinishReason] = []  # of the choices that have ended, up to _SHOWN_REASONS
        self._progress: list[_Progress] = []
        first = 0
        for part in parts:
            texts = (_output_text(model, part) for _ in range(part.request.n))
            self._progress.append(_Progress(part, [_ChoiceState(first + i, text) for i, text in enumerate(texts)]))
            first += part.request.n
        self.usage = Usage(sum(len(part.request.prompt_ids) for part in parts), left_out=parts[0].left_out)

    def shown(self) -> dict[str, Any]:
        """The fields of the request's line in the log: names and numbers. Counts are what there is so far."""
        used = self.usage
        return {
            "model": self._model,
            "prompt_tokens": used.prompt_tokens,
            "cached_tokens": used.cached_tokens,
            "completion_tokens": used.completion_tokens,
            "first_token_seconds": round(used.first_token_seconds, 4),
            "finish_reason": ",".join(self._reasons) or "none",
        }

    async def updates(self, gather: int = 1) -> AsyncGenerator[ChoiceUpdate, None]:
        """Yields updates in the order of the engine's deltas. Closing the generator early aborts the requests.

        An update comes when `gather` tokens are there, and at once for a choice's first token and its end. A slow
        reader gets more tokens in an update. With a stop string there is an update for each token: the engine computes
        on until the string is found.

        Raises the engine's RequestRejected and EngineError, and GenerationFailed if one of these requests failed.
        """
        deltas = self._engine(self._progress[0], gather) if len(self._progress) == 1 else self._merged(gather)
        by_id = {progress.part.request.request_id: progress for progress in self._progress}
        reason: FinishReason | None = "abort"
        try:
            async with aclosing(deltas):
                async for delta in deltas:
                    progress = by_id[delta.request_id]
                    if not progress.open:
                        for update in self._open(progress, delta):
                            yield update
                    elif (next_update := self._update(progress, delta)) is not None:
                        yield next_update
            if any(progress.unfinished for progress in self._progress):
                raise EngineError("the engine ended the request before it was complete; send it again")
        except Exception as error:
            reason = None if isinstance(error, RequestRejected | APIError) else "error"  # None: it never began
            if self._trace is not None:
                self._trace.error = type(error).__name__
            raise
        finally:
            if self._trace is not None:
                used = self.usage
                self._trace.usage(used.prompt_tokens, used.completion_tokens, used.cached_tokens)
            unfinished = sum(progress.unfinished for progress in self._progress)
            if reason is not None and unfinished:
                self._metrics.choices_cut_short(reason, unfinished)
                self._reasons.append(reason)

    def _engine(self, progress: _Progress, gather: int) -> AsyncGenerator[TokenDelta, None]:
        part = progress.part
        # Every client's iterator is a generator, as closing it aborts the request.
        return cast(AsyncGenerator[TokenDelta, None], self._client.generate(part.request, 1 if part.stop else gather))

    async def _merged(self, gather: int) -> AsyncGenerator[TokenDelta, None]:
        """Yields the deltas of several parts as they arrive. The engine client merges deltas if the reader is slow."""
        queue: asyncio.Queue[TokenDelta | Exception | None] = asyncio.Queue(len(self._progress))

        async def pump(progress: _Progress) -> None:
            try:
                async with aclosing(self._engine(progress, gather)) as deltas:
                    async for delta in deltas:
                        await queue.put(delta)
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        pumps = [asyncio.create_task(pump(progress)) for progress in self._progress]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def _open(self, progress: _Progress, delta: TokenDelta) -> list[ChoiceUpdate]:
        """The updates of a part's first deltas. If prompt logprobs are due, all are held until choice 0 has them."""
        request = progress.part.request
        if not progress.held:
            self.usage.cached_tokens += delta.cached_tokens
            waited = self._clock() - self._start
            self.usage.first_token_seconds = self.usage.first_token_seconds or waited
            self._metrics.request_prefilled(self._operation, len(request.prompt_ids), waited)
        wants_prompt = request.sampling.prompt_logprobs is not None and len(request.prompt_ids) > 1
        if wants_prompt and delta.choice != 0 and not delta.error:
            progress.held.append(delta)
            return []
        progress.open = True
        progress.prompt_logprobs = delta.prompt_logprobs
        deltas, progress.held = [delta, *progress.held], []
        return [update for delta in deltas if (update := self._update(progress, delta)) is not None]

    def _update(self, progress: _Progress, delta: TokenDelta) -> ChoiceUpdate | None:
        """The update of a delta, or None if its choice has ended already."""
        choice = progress.choices[delta.choice]
        part = progress.part
        if delta.timing is not None:
            self._metrics.engine_timed(delta.timing)
            if self._trace is not None:
                self._trace.engine_timed(delta.timing, self._clock() if delta.token_ids else choice.last)
            self.usage.accepted_prediction_tokens += delta.timing.accepted_prediction
            self.usage.rejected_prediction_tokens += delta.timing.rejected_prediction
        if choice.ended:
            return None
        if delta.error or delta.finish_reason in _FAILED:
            raise GenerationFailed(delta.error or "the engine aborted the request; send it again")
        began = choice.tokens
        if delta.offset != began:
            raise GenerationFailed(f"the engine sent token {delta.offset} of a choice, but token {began} was expected")
        text, offsets, keep, reason, stopped = _read(choice, part, delta)
        if reason is not None and delta.finish_reason is None:
            self._client.finish(delta.request_id, delta.choice, reason, keep)
        count = len(delta.token_ids)
        if count:
            now = self._clock()
            self._metrics.tokens_arrived(count, now - choice.last if began else 0.0)
            choice.last = now
            if not began:
                choice.first = now
        logprobs = delta.logprobs
        if logprobs and len(offsets) != count:
            logprobs = logprobs[: len(offsets) * row_size(part.request.sampling.logprobs or 0)]
        self.usage.completion_tokens += keep - began
        choice.tokens = keep
        if reason is not None:
            self._end(progress, choice, reason)
        prompt_logprobs = b"" if began else progress.prompt_logprobs
        return ChoiceUpdate(
            choice.index, text, keep, logprobs, offsets, reason, prompt_logprobs, delta.token_ids, stopped
        )

    def _end(self, progress: _Progress, choice: _ChoiceState, reason: FinishReason) -> None:
        choice.ended = True
        progress.unfinished -= 1
        if len(self._reasons) < _SHOWN_REASONS:
            self._reasons.append(reason)
        if self._trace is not None:
            self._trace.reasons.append(reason)
        self._metrics.choice_finished(self._operation, reason, choice.tokens, choice.last - choice.first)
        if not progress.unfinished:
            self._metrics.request_finished(self._operation, self._clock() - self._start)


def _output_text(model: ServedModel, part: PromptPart) -> OutputText:
    return OutputText(
        model.tokenizer,
        part.request.prompt_ids,
        stop=part.stop,
        include_stop=part.include_stop,
        skip_special_tokens=part.skip_special_tokens,
        shown=part.shown,
        min_tokens=part.request.sampling.min_tokens,
    )


def _read(
    choice: _ChoiceState, part: PromptPart, delta: TokenDelta
) -> tuple[str, tuple[int, ...], int, FinishReason | None, str | None]:
    """(text of a delta, offsets of its tokens, tokens of the choice so far, finish reason or None, stop string)."""
    if part.prompt_only:
        return "", (), 0, "length", None
    ids, reason = delta.token_ids, delta.finish_reason
    hides_last = delta.stop_token is not None and not part.include_stop  # a stop token is counted but not shown
    text, stopped, keep, offsets = choice.text.push(ids[:-1] if hides_last else ids)
    if reason is not None and stopped is None:
        rest = choice.text.finish()
        text, stopped = text + rest.text, rest.stopped
    choice.characters += len(text)
    if stopped is not None:
        return text, offsets, keep, "stop", stopped
    if hides_last and ids:
        return text, (*offsets, choice.characters), keep + 1, reason, None
    return text, offsets, keep, reason, None
