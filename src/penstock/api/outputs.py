"""The outputs that the library returns. Their names are vLLM's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.frontend.generation import ChoiceUpdate, PromptPart
from penstock.messages import FinishReason, TokenLogprobs, unpack_rows
from penstock.text import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """The natural logarithm of a token's probability, and its rank: 1 for the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


TokenAlternatives = dict[int, Logprob]  # by token id: the token of the text, and the most likely ones


@dataclass
class CompletionOutput:
    """One output of a prompt, so far."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # the sum over the tokens, if logprobs were requested
    logprobs: list[TokenAlternatives] | None = None
    finish_reason: FinishReason | None = None  # None: not finished


@dataclass
class RequestMetrics:
    """When things happened to a request, in seconds since the epoch, so far. None: not yet."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0  # of all outputs

    @property
    def first_token_latency(self) -> float | None:
        """Seconds from the request to its first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class RequestOutput:
    """A prompt and its outputs, so far."""

    request_id: str
    prompt: str | None  # None: the prompt was given as token ids, or as messages
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenAlternatives | None] | None = None  # None for the first token, which follows nothing
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The embedding of one text."""

    outputs: EmbeddingOutput


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """How well one pair of texts fits."""

    outputs: ScoringOutput


@dataclass(frozen=True)
class ClassificationOutput:
    probs: list[float]  # of each class
    label: str  # of the most likely class

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ClassificationRequestOutput:
    """The classes of one text."""

    outputs: ClassificationOutput


class OutputBuilder:
    """Collects the updates of one prompt."""

    def __init__(self, request_id: str, prompt: str | None, part: PromptPart, tokenizer: Tokenizer) -> None:
        sampling = part.request.sampling
        self._tokenizer = tokenizer
        self._k, self._prompt_k = sampling.logprobs, sampling.prompt_logprobs
        outputs = [CompletionOutput(i) for i in range(part.request.n)]
        if self._k is not None:
            for output in outputs:
                output.logprobs, output.cumulative_logprob = [], 0.0
        metrics = RequestMetrics(time.time())
        self.result = RequestOutput(request_id, prompt, list(part.request.prompt_ids), outputs, metrics=metrics)
        self._metrics = metrics

    def add(self, update: ChoiceUpdate) -> None:
        output = self.result.outputs[update.choice]
        output.text += update.text
        output.token_ids += update.token_ids
        del output.token_ids[update.tokens :]  # a stop string may begin in tokens that came before
        output.finish_reason = update.finish_reason
        if self._k is not None and output.logprobs is not None:
            rows = list(unpack_rows(update.logprobs, self._k))
            output.logprobs += map(self._alternatives, rows)
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(row.logprob for row in rows)
        if self._prompt_k is not None and self.result.prompt_logprobs is None:
            rows = list(unpack_rows(update.prompt_logprobs, self._prompt_k))
            self.result.prompt_logprobs = [None, *map(self._alternatives, rows)]
        self._count()

    def _count(self) -> None:
        metrics, now = self._metrics, time.time()
        tokens = sum(len(output.token_ids) for output in self.result.outputs)
        if tokens > metrics.num_generation_tokens:
            metrics.first_token_time = metrics.first_token_time or now
            metrics.last_token_time = now
        metrics.num_generation_tokens = tokens
        if self.result.finished:
            metrics.finished_time = now

    def _alternatives(self, row: TokenLogprobs) -> TokenAlternatives:
        ranked: Sequence[tuple[int, float, int]] = [
            *((token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(row.top, 1)),
            (row.token_id, row.logprob, row.rank),
        ]
        return {token_id: Logprob(logprob, rank, self._tokenizer.token(token_id)) for token_id, logprob, rank in ranked}
