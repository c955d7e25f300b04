"""Runs a call at a provider: its stream becomes the updates that the codecs of all wires encode."""

import math
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import orjson

from penstock.frontend.call import Call
from penstock.frontend.errors import APIError, ProviderFailed
from penstock.frontend.generation import ChoiceUpdate, PromptPart, Usage
from penstock.frontend.providers.file import ModelEntry
from penstock.frontend.providers.provider import ProviderAnswer, ProviderClient
from penstock.frontend.providers.wires.parts import AnswerPiece, Ending, Question, estimate, stream_broken
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.tenants.account import EngineUse
from penstock.messages import FinishReason, RequestRejected
from penstock.observe.tracing import RequestTrace
from penstock.text.calls import Part


class ProviderReply:
    """A frontend ReplyReader: the parts of a provider's answer that the wire's codec has not taken yet."""

    def __init__(self, use: ToolUse, choices: int) -> None:
        self.reasoning_tokens: int | None = None
        self._named = use.choice == "named"
        self._parts: list[list[Part]] = [[] for _ in range(choices)]
        self._called = [False] * choices
        self._filtered = [False] * choices

    def add(self, choice: int, part: Part) -> None:
        self._parts[choice].append(part)
        self._called[choice] = self._called[choice] or part.kind == "call"

    def filtered(self, choice: int) -> None:
        """Notes that the provider's filter has ended a choice."""
        self._filtered[choice] = True

    def read(self, choice: int, text: str, offsets: Sequence[int], *, ended: bool) -> list[Part]:
        """Returns the parts since the last call of this method. They are there already: the text is not read."""
        parts, self._parts[choice] = self._parts[choice], []
        return parts

    def finish_reason(self, choice: int, reason: FinishReason) -> str:
        if self._filtered[choice]:
            return "content_filter"
        return "tool_calls" if self._called[choice] and reason == "stop" and not self._named else reason

    def called(self, choice: int) -> bool:
        return self._called[choice]


class ProviderPart(PromptPart, frozen=True, kw_only=True):
    """A chat for a provider in the place of a prompt for an engine."""

    question: Question
    body: bytes  # of the request to the provider
    reply: ProviderReply


class _ProviderChoice:
    def __init__(self) -> None:
        self.text = ""  # content
        self.size = 0  # characters, with those of reasoning and calls
        self.plain = True  # there is nothing but content
        self.first = self.last = 0.0  # when output came
        self.ending: Ending | None = None

    @property
    def tokens(self) -> int:
        """About how many tokens there are, until the provider has counted them."""
        return (self.size + 3) // 4


class ProviderGeneration:
    """Yields the updates of a call at a provider. See frontend's Generation."""

    def __init__(
        self,
        provider: ProviderClient,
        model: ModelEntry,
        call: Call,
        start: float,
        request_id: str = "",
        trace: RequestTrace | None = None,
    ) -> None:
        (part,) = call.parts
        assert isinstance(part, ProviderPart)
        self.request_id = request_id
        self._provider, self._model, self._part = provider, model, part
        self._name = call.context.model.name
        self._context, self._metrics, self._operation = call.context, call.context.metrics, call.operation
        self._start, self._trace = start, trace
        self._choices = [_ProviderChoice() for _ in range(part.request.n)]
        self._spent = [0, 0, 0]  # tokens of streams that broke: of prompts, of these cached, of output
        self._first = 0.0  # when the first output came
        prompt = part.question.chat.prompt
        texts = (message.get("content") or "" for message in prompt.messages)
        self.prompt_estimate = sum(map(estimate, texts)) + estimate(str(prompt.tools or ""))
        self.usage = Usage(self.prompt_estimate)
        if trace is not None:
            trace.call(call.operation, self._name, [part.request])

    def shown(self) -> dict[str, Any]:
        """The fields of the request's line in the log."""
        used = self.usage
        reasons = ",".join(choice.ending.reason for choice in self._choices if choice.ending is not None)
        return {
            "model": self._name,
            "provider": self._provider.name,
            "prompt_tokens": used.prompt_tokens,
            "cached_tokens": used.cached_tokens,
            "completion_tokens": used.completion_tokens,
            "first_token_seconds": round(used.first_token_seconds, 4),
            "finish_reason": reasons or "none",
        }

    async def updates(self, gather: int = 1) -> AsyncGenerator[ChoiceUpdate, None]:
        """Yields an update for each choice with news in a piece of the stream. The last ones come when the stream is
        complete, so that the usage is there. Closing the generator early closes the connection.

        Raises APIError, of which ProviderFailed is one, and QueueFull.
        """
        account, use = self._context.account, None
        if account is not None:
            use = await account.reserve(self._part.request, self.prompt_estimate, self._model.price)
            self.usage.price = account.shown_price
        reason: FinishReason | None = "abort"
        answer = ProviderAnswer()
        try:
            async with aclosing(self._streams(answer)) as streams:
                async for found in streams:
                    for update in self._read(found):
                        yield update
            self._count(answer)
            for number, choice in enumerate(self._choices):
                yield self._end(number, choice)
            self._metrics.request_finished(self._operation, time.monotonic() - self._start)
        except Exception as error:
            refused = isinstance(error, RequestRejected | APIError) and not self._first
            reason = None if refused else "error"  # None: it never began
            if self._trace is not None:
                self._trace.error = type(error).__name__
            raise
        finally:
            self._count(answer)
            self._settle(use)
            open_choices = sum(choice.ending is None for choice in self._choices)
            if reason is not None and open_choices:
                self._metrics.choices_cut_short(reason, open_choices)

    async def _streams(self, answer: ProviderAnswer) -> AsyncGenerator[list[AnswerPiece | Ending], None]:
        """Yields what the provider's stream says. If it breaks, and the provider continues a text that has begun, its
        next stream follows."""
        question, body, entry = self._part.question, self._part.body, self._provider.entry
        for tries in range(entry.retries + 1):
            first_deadline, deadline = self._deadlines()
            question = question._replace(first_deadline=first_deadline, deadline=deadline)
            try:
                async with aclosing(self._provider.ask(question, body, answer)) as pieces:
                    async for found in pieces:
                        yield found
                return
            except ProviderFailed:
                if all(choice.ending is not None for choice in self._choices):
                    return  # only the end mark is missing
                first = self._choices[0]
                continues = question.plain or "prefix" in entry.accepts
                single = len(self._choices) == 1 and first.plain
                if not first.text or not continues or not single or tries == entry.retries:
                    raise
                self._spend(answer, first.tokens)
                question = question._replace(begun=first.text)
                body = orjson.dumps(self._provider.wire.body(question))

    def _deadlines(self) -> tuple[float, float]:
        """When the first piece and the last one are due."""
        request = self._part.request
        first = math.inf if self._first else request.first_token_deadline or math.inf
        return first, request.deadline or math.inf

    def _spend(self, answer: ProviderAnswer, tokens: int) -> None:
        """Counts a stream that broke after about so many tokens of the whole answer."""
        assert answer.reader is not None
        counts = answer.reader.counts
        self._spent[0] += self.prompt_estimate if counts.prompt is None else counts.prompt
        self._spent[1] += counts.cached
        self._spent[2] = tokens
        self._provider.results["continued"] += 1

    def _read(self, found: list[AnswerPiece | Ending]) -> list[ChoiceUpdate]:
        """The updates of what one piece of the stream says: one for each choice."""
        texts: dict[int, str] = {}
        for each in found:
            if not 0 <= each.choice < len(self._choices):
                raise stream_broken(f"has choice {each.choice}, which was not requested")
            choice = self._choices[each.choice]
            if isinstance(each, Ending):
                choice.ending = choice.ending or each
                continue
            part = each.part
            self._part.reply.add(each.choice, part)
            choice.size += len(part.text)
            choice.plain = choice.plain and part.kind == "content"
            shown = part.text if part.kind == "content" else ""
            texts[each.choice] = texts.get(each.choice, "") + shown
        return [self._update(number, self._choices[number], text) for number, text in texts.items()]

    def _update(self, number: int, choice: _ProviderChoice, text: str) -> ChoiceUpdate:
        now = time.monotonic()
        if not self._first:
            self._first = now
            self.usage.first_token_seconds = now - self._start
            self._metrics.request_prefilled(self._operation, self.prompt_estimate, now - self._start)
        choice.first = choice.first or now
        choice.last = now
        choice.text += text
        if choice.size > self._context.limits.max_answer_bytes:
            raise stream_broken(f"has more than {self._context.limits.max_answer_bytes} characters")
        return ChoiceUpdate(number, text, choice.tokens, b"", (), None, b"", ())

    def _end(self, number: int, choice: _ProviderChoice) -> ChoiceUpdate:
        """The last update of a choice."""
        if choice.ending is None:
            raise stream_broken(f"ended without a finish reason of choice {number}")
        reason: FinishReason = "length" if choice.ending.reason == "length" else "stop"
        if choice.ending.reason == "content_filter":
            self._part.reply.filtered(number)
        tokens = self.usage.completion_tokens if len(self._choices) == 1 else choice.tokens
        self._metrics.choice_finished(self._operation, reason, tokens, choice.last - choice.first)
        if self._trace is not None:
            self._trace.reasons.append(reason)
        return ChoiceUpdate(number, "", tokens, b"", (), reason, b"", (), choice.ending.stopped)

    def _count(self, answer: ProviderAnswer) -> None:
        """Takes the provider's counts of tokens, and estimates those that it has not sent."""
        used, (prompt, cached, output) = self.usage, self._spent
        if answer.reader is None:
            return
        counts, rest = answer.reader.counts, answer.reader.counts.output
        if rest is None or not answer.reader.complete:
            rest = max(rest or 0, sum(choice.tokens for choice in self._choices) - output)
        used.prompt_tokens = prompt + (self.prompt_estimate if counts.prompt is None else counts.prompt)
        used.cached_tokens = cached + counts.cached
        used.completion_tokens = output + rest
        used.reasoning_tokens = self._part.reply.reasoning_tokens = counts.reasoning

    def _settle(self, use: EngineUse | None) -> None:
        used, account = self.usage, self._context.account
        if self._first:
            self._metrics.generation_tokens += used.completion_tokens
            computed, price = used.prompt_tokens - used.cached_tokens, self._model.price
            self._provider.cost[self._name] += price.cost(computed, used.cached_tokens, used.completion_tokens)
        if self._trace is not None:
            self._trace.usage(used.prompt_tokens, used.completion_tokens, used.cached_tokens)
        if use is None or account is None:
            return
        if self._first:
            use.started, use.first = True, self._first
            use.prompt, use.cached, use.outputs = used.prompt_tokens, used.cached_tokens, {0: used.completion_tokens}
        account.settle(use)
