"""One call's prompts through the engine, and their tokens back into text. Knows no dialect."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, cast

from penstock.frontend.errors import GenerationFailed
from penstock.frontend.served import ServedModel
from penstock.messages import EngineError, FinishReason, GenerateRequest, RequestRejected, TokenDelta, row_size
from penstock.observe.model import ModelMetrics
from penstock.text import OutputText

_FAILED = ("error", "abort")


@dataclass(frozen=True, slots=True)
class Part:
    """One prompt of a call, and how its output becomes text."""

    request: GenerateRequest
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # the text keeps the stop string, or the stop token, that ended it
    skip_special_tokens: bool = True
    prompt_only: bool = False  # the client asked for no output at all; the engine's one token is dropped


class Update(NamedTuple):
    """What is new of one choice. The last one of a choice has a finish reason."""

    choice: int  # prompt x n + the choice of that prompt
    text: str
    tokens: int  # of the choice so far
    logprobs: bytes  # packed rows, one per token that is new
    offsets: tuple[int, ...]  # for each of those: where in the choice's text its own begins
    finish_reason: FinishReason | None
    prompt_logprobs: bytes  # packed rows, with the first update of each choice, where asked for


@dataclass(slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


class _Choice:
    """A choice under way."""

    __slots__ = ("characters", "ended", "first", "index", "last", "text", "tokens")

    def __init__(self, index: int, text: OutputText) -> None:
        self.index = index
        self.text = text
        self.tokens = 0
        self.characters = 0  # of text given so far
        self.first = 0.0  # when its first token came, and its last
        self.last = 0.0
        self.ended = False


class _Progress:
    """A part under way."""

    __slots__ = ("choices", "held", "open", "part", "prompt_logprobs", "unfinished")

    def __init__(self, part: Part, choices: list[_Choice]) -> None:
        self.part = part
        self.choices = choices
        self.unfinished = len(choices)
        self.open = False  # its first delta has been read, and with it the prompt's logprobs
        self.prompt_logprobs = b""
        self.held: list[TokenDelta] = []  # of other choices, that came before


class Generation:
    """The updates of all prompts of one call, as they come.

    `operation` names the kind of call in metrics, `start` is when it was received, on the same clock. Choices are
    numbered prompt by prompt.
    """

    def __init__(
        self,
        model: ServedModel,
        parts: Sequence[Part],
        metrics: ModelMetrics,
        operation: str,
        start: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = model.client
        self._metrics = metrics
        self._operation = operation
        self._clock = clock
        self._start = start
        self._progress: list[_Progress] = []
        for part in parts:
            first = sum(len(progress.choices) for progress in self._progress)
            texts = (_output_text(model, part) for _ in range(part.request.n))
            self._progress.append(_Progress(part, [_Choice(first + i, text) for i, text in enumerate(texts)]))
        self.usage = Usage(sum(len(part.request.prompt_ids) for part in parts))

    async def updates(self) -> AsyncGenerator[Update, None]:
        """Closing it early aborts what is still running.

        Raises RequestRejected and EngineError as the engine does, and GenerationFailed for this request's own errors.
        """
        deltas = self._engine(self._progress[0]) if len(self._progress) == 1 else self._merged()
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
        except RequestRejected:
            reason = None  # it never began
            raise
        except Exception:
            reason = "error"
            raise
        finally:
            if reason is not None:
                self._metrics.choices_cut_short(reason, sum(progress.unfinished for progress in self._progress))

    def _engine(self, progress: _Progress) -> AsyncGenerator[TokenDelta, None]:
        # Closing early is how a request is aborted, so every client's iterator is a generator.
        return cast(AsyncGenerator[TokenDelta, None], self._client.generate(progress.part.request))

    async def _merged(self) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of several parts, as they come. A slow reader holds up every part, and the client merges for it."""
        queue: asyncio.Queue[TokenDelta | Exception | None] = asyncio.Queue(len(self._progress))

        async def pump(progress: _Progress) -> None:
            try:
                async with aclosing(self._engine(progress)) as deltas:
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

    def _open(self, progress: _Progress, delta: TokenDelta) -> list[Update]:
        """The updates of a part's first deltas. All wait for choice 0's where that brings the prompt's logprobs."""
        request = progress.part.request
        if not progress.held:
            self.usage.cached_tokens += delta.cached_tokens
            waited = self._clock() - self._start
            self._metrics.request_prefilled(self._operation, len(request.prompt_ids), waited)
        wants_prompt = request.sampling.prompt_logprobs is not None and len(request.prompt_ids) > 1
        if wants_prompt and delta.choice != 0 and not delta.error:
            progress.held.append(delta)
            return []
        progress.open = True
        progress.prompt_logprobs = delta.prompt_logprobs
        deltas, progress.held = [delta, *progress.held], []
        return [update for delta in deltas if (update := self._update(progress, delta)) is not None]

    def _update(self, progress: _Progress, delta: TokenDelta) -> Update | None:
        """What a delta brings; nothing for a choice that has ended already."""
        choice = progress.choices[delta.choice]
        part = progress.part
        if delta.timing is not None:
            self._metrics.engine_timed(delta.timing)
        if choice.ended:
            return None
        if delta.error or delta.finish_reason in _FAILED:
            raise GenerationFailed(delta.error or "the engine aborted the request; send it again")
        began = choice.tokens
        if delta.offset != began:
            raise GenerationFailed(f"the engine sent token {delta.offset} of a choice where {began} was next")
        text, offsets, keep, reason = _read(choice, part, delta)
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
        return Update(choice.index, text, keep, logprobs, offsets, reason, prompt_logprobs)

    def _end(self, progress: _Progress, choice: _Choice, reason: FinishReason) -> None:
        choice.ended = True
        progress.unfinished -= 1
        self._metrics.choice_finished(self._operation, reason, choice.tokens, choice.last - choice.first)
        if not progress.unfinished:
            self._metrics.request_finished(self._operation, self._clock() - self._start)


def _output_text(model: ServedModel, part: Part) -> OutputText:
    return OutputText(
        model.tokenizer,
        part.request.prompt_ids,
        stop=part.stop,
        include_stop=part.include_stop,
        skip_special_tokens=part.skip_special_tokens,
        min_tokens=part.request.sampling.min_tokens,
    )


def _read(choice: _Choice, part: Part, delta: TokenDelta) -> tuple[str, tuple[int, ...], int, FinishReason | None]:
    """A delta's text, its tokens' offsets, the choice's tokens with it, and why the choice ends here, if it does."""
    if part.prompt_only:
        return "", (), 0, "length"
    ids, reason = delta.token_ids, delta.finish_reason
    hides_last = delta.stop_token is not None and not part.include_stop  # a stop token is counted but not shown
    text, stopped, keep, offsets = choice.text.push(ids[:-1] if hides_last else ids)
    if reason is not None and stopped is None:
        rest = choice.text.finish()
        text, stopped = text + rest.text, rest.stopped
    choice.characters += len(text)
    if stopped is not None:
        return text, offsets, keep, "stop"
    if hides_last and ids:
        return text, (*offsets, choice.characters), keep + 1, reason
    return text, offsets, keep, reason
