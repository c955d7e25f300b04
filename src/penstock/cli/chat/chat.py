"""A chat with an engine: sends a prompt with the conversation before it, and streams the answer."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.cli.chat.conversation import Conversation, Message
from penstock.cli.chat.settings import ChatSettings
from penstock.messages import EngineClient, GenerateRequest
from penstock.text import OutputText, Tokenizer
from penstock.text.calls import ChatFormat

End = Literal["complete", "max_tokens", "context", "stopped"]


@dataclass(frozen=True)
class AnswerFigures:
    """The figures of an answer. Times are in seconds from the request, as the client sees them."""

    prompt_tokens: int
    cached_tokens: int
    tokens: int
    first_token: float
    seconds: float  # to the last token
    end: End
    kept: bool  # in the conversation

    @property
    def rate(self) -> float:
        """Tokens per second after the first token; 0 for fewer than two tokens."""
        decoding = self.seconds - self.first_token
        return (self.tokens - 1) / decoding if self.tokens > 1 and decoding > 0 else 0.0

    def summary(self) -> str:
        """Returns the figures on one line."""
        return f"{self.tokens} tokens, {self.rate:.1f} tok/s, first token after {self.first_token:.2f} s"


class Chat:
    """Sends prompts to an engine. With `raw`, a prompt is completed by itself, without template and conversation."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        settings: ChatSettings,
        conversation: Conversation,
        *,
        raw: bool = False,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.settings = settings
        self.conversation = conversation
        self.raw = raw
        self.last: AnswerFigures | None = None
        self._requests = 0
        self._chat_format = ChatFormat(tokenizer)

    @property
    def context(self) -> int:
        """The most tokens of a conversation and its answer."""
        return self.client.info.max_model_len

    async def answer(self, prompt: str, write: Callable[[str], None]) -> AnswerFigures:
        """Streams the answer to `write`. Raises ValueError for a prompt that cannot be sent.

        A cancelled answer becomes part of the conversation as far as it came. A prompt whose answer fails, or is
        cancelled before its first token, does not.
        """
        ids = self._prompt_ids(prompt)
        left = self.context - len(ids)
        sampling = self.settings.sampling(secrets.randbits(64), left, self.client.info.eos_token_ids)
        self._requests += 1
        request = GenerateRequest(request_id=f"run-{self._requests}", prompt_ids=tuple(ids), sampling=sampling)
        output, said = OutputText(self.tokenizer, ids), _Said(len(ids), write)
        end: End = "complete"
        try:
            async for delta in self.client.generate(request):
                if delta.error:
                    raise ValueError(delta.error)
                shown = delta.token_ids if delta.stop_token is None else delta.token_ids[:-1]
                said.add(output.push(shown).text, len(delta.token_ids), delta.cached_tokens)
                if delta.finish_reason == "length":
                    end = "context" if sampling.max_tokens == left else "max_tokens"
            said.add(output.finish().text, 0, 0)
        except asyncio.CancelledError:
            self._keep(prompt, said, "stopped")
            raise
        return self._keep(prompt, said, end)

    def _keep(self, prompt: str, said: "_Said", end: End) -> AnswerFigures:
        text = said.text
        kept = not self.raw and bool(text or end != "stopped")
        if kept:
            self.conversation.turns.append((prompt, text))
        self.last = said.figures(end, kept)
        return self.last

    def _prompt_ids(self, prompt: str) -> list[int]:
        """Returns the token ids of the conversation with `prompt`. Raises ValueError."""
        if not prompt.strip():
            raise ValueError("the prompt is empty; write at least a word")
        space = min(256, max(1, self.context // 8), self.settings["max_tokens"])
        if self.raw:
            return Conversation().fit(prompt, lambda messages: self.tokenizer.encode(prompt), self.context, space)
        return self.conversation.fit(prompt, self._render, self.context, space)

    def _render(self, messages: Sequence[Message]) -> list[int]:
        pieces = self._chat_format.render_pieces(messages)
        return self.tokenizer.encode_pieces(pieces, add_special_tokens=False)


class _Said:
    """Collects an answer and its figures."""

    def __init__(self, prompt_tokens: int, write: Callable[[str], None]) -> None:
        self._texts: list[str] = []
        self._write = write
        self._prompt_tokens = prompt_tokens
        self._cached = self._tokens = 0
        self._began = self._last = time.perf_counter()
        self._first: float | None = None

    def add(self, text: str, tokens: int, cached: int) -> None:
        self._last = time.perf_counter()
        if self._first is None and tokens:
            self._first = self._last
        self._tokens += tokens
        self._cached = max(self._cached, cached)
        if text:
            self._texts.append(text)
            self._write(text)

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def figures(self, end: End, kept: bool) -> AnswerFigures:
        first = self._last if self._first is None else self._first
        return AnswerFigures(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            tokens=self._tokens,
            first_token=first - self._began,
            seconds=self._last - self._began,
            end=end,
            kept=kept,
        )
