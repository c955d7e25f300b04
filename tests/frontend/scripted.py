"""An EngineClient that says what a test tells it to, cut into deltas where the test wants them cut."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np

from penstock.engine.queue import RequestQueue
from penstock.messages import (
    Completed,
    ComputeUsage,
    ControlAnswer,
    ControlMessage,
    EngineError,
    EngineInfo,
    EngineState,
    EngineStats,
    EngineStatus,
    FinishReason,
    ForgottenBlocks,
    GenerateRequest,
    RequestTiming,
    ResetCache,
    Sleep,
    TokenDelta,
    TokenLogprobs,
    Wake,
    pack_row,
)

Output = Callable[[GenerateRequest, int], Sequence[int]]  # the tokens of a choice; repeated when they run out


def logprob_of(token_id: int) -> float:
    """The logprob every scripted token has, exact in float32."""
    return -(token_id % 7 + 1) / 8


class ScriptedClient:
    """Plays `output` in deltas of `cuts` tokens (repeated), choice by choice. Records what it is asked and told."""

    def __init__(
        self, output: Output, *, cuts: Sequence[int] = (1,), vocab_size: int, eos: int, max_model_len: int = 64
    ) -> None:
        self.info = EngineInfo(
            model="scripted",
            revision="r1",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=8,
            block_size=4,
            num_blocks=(100,),
            dtype="float32",
            incarnation=1,
            pid=0,
            eos_token_ids=(eos,),
        )
        self.output = output
        self.cuts = cuts
        self.status: EngineStatus = "ready"
        self.closed = False
        self.queue = RequestQueue(max_num_seqs=8, max_waiting=1024, max_waiting_tokens=1 << 20, clock=time.monotonic)
        self.gate: asyncio.Event | None = None  # set: deltas after the first of a request wait for it
        self.refusal: Exception | None = None
        self.dies_after: int | None = None  # deltas of a request, then EngineError
        self.row_error_after: int | None = None  # deltas of a request, then an error of this request only
        self.cached_tokens = 0
        self.width = 0  # of the vectors of requests with pooling
        self.usage: ComputeUsage | None = None
        self.predicted = (0, 0)  # drafts from the prediction, accepted and refused, of each choice
        self.prompt_logprobs_late = False  # choice 0 last in every round
        self.requests: list[GenerateRequest] = []
        self.gathered: list[int] = []  # of each of them, see EngineClient.generate
        self.finished: list[tuple[str, int, FinishReason, int]] = []
        self.aborted: list[str] = []
        self.running = 0
        self._counters = EngineStats(blocks_total=(100,), blocks_held=(25,), blocks_cached=(5,), preemptions=3)

    async def generate(self, request: GenerateRequest, gather: int = 1) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        self.gathered.append(gather)
        if self.refusal is not None:
            raise self.refusal
        self.running += 1
        complete = False
        try:
            for count, delta in enumerate(self._deltas(request)):
                if count or request.pooling is not None:  # no engine answers at once
                    await self._pace()
                self._check_alive(count)
                if count == self.row_error_after:
                    delta = TokenDelta(
                        request.request_id, delta.choice, delta.offset, (), "error", error="NaN in the logits"
                    )
                yield delta
            complete = True
        finally:
            self.running -= 1
            if not complete:
                self.aborted.append(request.request_id)

    def finish(self, request_id: str, choice: int, reason: FinishReason, keep: int) -> None:
        self.finished.append((request_id, choice, reason, keep))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return self._counters

    @property
    def state(self) -> EngineState:
        return EngineState(self.status)

    async def control(self, message: ControlMessage) -> ControlAnswer:
        match message:
            case Sleep():
                self.status = "asleep"
            case Wake():
                self.status = "ready"
            case ResetCache():
                return ForgottenBlocks((0,))
            case _:
                raise ValueError(message)
        return Completed()

    async def close(self) -> None:
        self.closed = True
        self.status = "ended"
        if self.gate is not None:
            self.gate.set()

    async def _pace(self) -> None:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()

    def _check_alive(self, count: int) -> None:
        if self.closed or count == self.dies_after:
            raise EngineError("the engine ended")

    def _deltas(self, request: GenerateRequest):  # type: ignore[no-untyped-def]
        """Rounds over the choices until each has ended, by its length, by a stop token, or because it was told so. The
        vector of a pooled request depends on its tokens."""
        if request.pooling is not None:
            vector = np.random.default_rng(request.prompt_ids).standard_normal(self.width, np.float32)
            yield TokenDelta(request.request_id, 0, 0, (), "stop", pooled=vector.tobytes())
            return
        order = list(range(request.n))
        if self.prompt_logprobs_late:
            order.reverse()
        choices = {c: self._choice(request, c) for c in order}
        while choices:
            for number in [c for c in order if c in choices]:
                told = next((f for f in self.finished if f[:2] == (request.request_id, number)), None)
                if told is not None:
                    del choices[number]
                    timing = RequestTiming(0.5, 0.25, 1.0, 0, *self.predicted)
                    yield TokenDelta(request.request_id, number, told[3], (), told[2], timing=timing)
                    continue
                delta = next(choices[number])
                yield delta
                if delta.finish_reason is not None:
                    del choices[number]

    def _choice(self, request: GenerateRequest, number: int):  # type: ignore[no-untyped-def]
        sampling = request.sampling
        tokens = itertools.cycle(self.output(request, number))
        offset, prompt_logprobs = 0, b""
        if number == 0 and sampling.prompt_logprobs is not None:
            prompt_logprobs = self._rows(request.prompt_ids[1:], sampling.prompt_logprobs)
        for cut in itertools.cycle(self.cuts):
            ids: list[int] = []
            stop_token = None
            for token in itertools.islice(tokens, min(cut, sampling.max_tokens - offset)):
                ids.append(token)
                if token in sampling.stops() and offset + len(ids) > sampling.min_tokens:
                    stop_token = token
                    break
            ends = offset + len(ids) == sampling.max_tokens
            reason: FinishReason | None = "stop" if stop_token is not None else "length" if ends else None
            yield TokenDelta(
                request.request_id,
                number,
                offset,
                tuple(ids),
                reason,
                stop_token,
                cached_tokens=self.cached_tokens,
                logprobs=b"" if sampling.logprobs is None else self._rows(ids, sampling.logprobs),
                prompt_logprobs=prompt_logprobs,
                timing=RequestTiming(0.5, 0.25, 1.0, 0, *self.predicted, usage=self.usage) if reason else None,
            )
            prompt_logprobs = b""
            offset += len(ids)

    def _rows(self, ids: Sequence[int], k: int) -> bytes:
        """Each token is the likeliest; its alternatives are the ids after it."""
        vocab_size = self.info.vocab_size
        rows = []
        for token in ids:
            top = tuple(((token + i) % vocab_size, logprob_of(token) - i) for i in range(k))
            rows.append(pack_row(TokenLogprobs(token, logprob_of(token), 1, top)))
        return b"".join(rows)
