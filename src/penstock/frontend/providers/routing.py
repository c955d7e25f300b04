"""Sends requests to a small or a large model: by their prompt, or by how sure the small model is of its answer."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from penstock.frontend.call import Call
from penstock.frontend.errors import APIError
from penstock.frontend.generation import ChoiceUpdate, PromptPart
from penstock.frontend.providers.difficulty import read_classifier
from penstock.frontend.providers.file import RouteEntry
from penstock.messages import unpack_rows
from penstock.observe.tracing import RequestTrace

HELD_SECONDS = 15.0  # after which the large model answers. Streams send headers after 20 s, and then keep their model


class ModelRoute:
    """Chooses the model for a request to one route."""

    def __init__(self, entry: RouteEntry, named: str) -> None:
        """Raises ValueError if the classifier's file cannot be used; `named` is what the error calls it."""
        self.entry = entry
        self._classifier = read_classifier(entry.classifier, named) if entry.classifier else None

    def choose(self, body: bytes) -> str:
        """Returns the model that shall answer, or at least try to."""
        if self._classifier is None or self._classifier.probability_of(body) >= self.entry.probability:
            return self.entry.small
        return self.entry.large


class SmallRefused(APIError):
    """The small answer is not good enough. The large model answers, so clients do not get this error."""

    def __init__(self, why: str) -> None:
        super().__init__(503, f"the small answer {why}; the large model answers", code="small_refused")


class HeldAnswer:
    """The output of a small model. None of it is yielded before its first tokens have shown that it is good enough.

    The mean log-probability as a sign of a right answer: Gupta et al., 2024, https://arxiv.org/abs/2404.10136.
    """

    def __init__(
        self, route: ModelRoute, call: Call, start: float, request_id: str, trace: RequestTrace | None
    ) -> None:
        self._route = route.entry
        asked = call.parts[0].request.sampling.logprobs  # the same for all parts
        self._added, self._k = asked is None, asked or 0
        self._choices = sum(part.request.n for part in call.parts)
        call = call._replace(parts=tuple(map(_with_logprobs, call.parts)))
        self._generation = call.generation(start, request_id, trace)
        self.request_id, self.usage = self._generation.request_id, self._generation.usage

    def shown(self) -> dict[str, Any]:
        """See Generation."""
        return self._generation.shown()

    async def updates(self, gather: int = 1) -> AsyncGenerator[ChoiceUpdate, None]:
        """Yields what Generation does. Raises SmallRefused before the first update."""
        held: list[ChoiceUpdate] = []
        total, count, ended = 0.0, 0, 0
        async with aclosing(self._generation.updates(gather)) as updates:
            try:
                async with asyncio.timeout(HELD_SECONDS):
                    async for update in updates:
                        for row in unpack_rows(update.logprobs, self._k):
                            total, count = total + row.logprob, count + 1
                        held.append(self._as_asked(update))
                        ended += update.finish_reason is not None
                        if count >= self._route.tokens * self._choices or ended == self._choices:
                            break
            except TimeoutError:
                raise SmallRefused(f"took more than {HELD_SECONDS:g} s") from None
            assert self._route.logprob is not None
            if count and total / count < self._route.logprob:
                raise SmallRefused(f"has a mean log-probability of {total / count:.3g}")
            for update in held:
                yield update
            async for update in updates:
                yield self._as_asked(update)

    def _as_asked(self, update: ChoiceUpdate) -> ChoiceUpdate:
        """The update without log-probabilities, if the client has not asked for them."""
        return replace(update, logprobs=b"") if self._added else update


def _with_logprobs(part: PromptPart) -> PromptPart:
    sampling = part.request.sampling
    if sampling.logprobs is not None:
        return part
    return replace(part, request=replace(part.request, sampling=replace(sampling, logprobs=0)))
