"""Makes the models of providers look to the server like those that it has itself."""

import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import orjson
from msgspec.structs import replace

from penstock.frontend.call import Call, ModelContext
from penstock.frontend.errors import APIError, invalid, unavailable
from penstock.frontend.providers.file import ModelEntry
from penstock.frontend.providers.generation import ProviderGeneration, ProviderPart, ProviderReply
from penstock.frontend.providers.provider import ProviderClient
from penstock.frontend.providers.wires.parts import Question
from penstock.frontend.requests.chat import ChatRequest, PreparedChat, check_messages
from penstock.frontend.requests.sampling import make_parts
from penstock.frontend.served import ServedModel
from penstock.messages import EngineClient, EngineInfo, EngineState, EngineStats, QueueFull
from penstock.observe.tracing import RequestTrace
from penstock.text import Tokenizer


class ProviderModel:
    """A model at a provider: it takes chats, and its text is already divided into content, reasoning and calls."""

    def __init__(self, provider: ProviderClient, entry: ModelEntry) -> None:
        self.provider, self.entry = provider, entry

    async def prepare(self, context: ModelContext, chat: ChatRequest) -> PreparedChat:
        """Returns what runs a chat at the provider. Raises APIError 400 for a parameter, as `prepare_chat` does."""
        check_messages(chat.prompt)
        lacks = {
            "logprobs": chat.logprobs is not None,
            "prompt_logprobs": chat.prompt_logprobs is not None,
            "stop_token_ids": chat.options.stop_token_ids,
            "include_stop_str_in_output": chat.options.include_stop,
            "context": chat.prompt.earlier_ids,
            "suffix": chat.prompt.suffix and "completions" not in self.provider.entry.accepts,
        }
        for name, given in lacks.items():
            if given:
                raise unavailable(name)
        if chat.shorten and (chat.max_tokens or 0) > self.entry.context:
            chat = replace(chat, max_tokens=self.entry.context)
        wanted = self.entry.max_output if chat.max_tokens is None else chat.max_tokens
        if wanted < 1 or wanted > self.entry.context:
            limit = f"from 1 to {self.entry.context}, the context of the model"
            raise invalid(f"{chat.max_tokens_param} is {wanted}; it must be {limit}: change it", chat.max_tokens_param)
        question = Question(chat, self.entry.model or context.model.name, self.entry, self.provider.entry)
        body = self.provider.wire.body(question)  # raises APIError
        (part,) = make_parts(context, chat.options, [()], [wanted], None, None)
        reply = ProviderReply(chat.use, chat.options.n)
        request = part.request
        made = ProviderPart(request=request, stop=part.stop, question=question, body=orjson.dumps(body), reply=reply)
        return PreparedChat(made, reply)

    def generation(self, call: Call, start: float, request_id: str, trace: RequestTrace | None) -> ProviderGeneration:
        """Returns the output of a call whose part `prepare` has made."""
        return ProviderGeneration(self.provider, self.entry, call, start, request_id, trace)


def served(name: str, entry: ModelEntry, provider: ProviderClient) -> ServedModel:
    """Returns a model of a provider as wires, metrics and lists of models see it."""
    client = cast(EngineClient, _NoEngine(name, entry, provider))
    return ServedModel(
        name=name,
        client=client,
        tokenizer=cast(Tokenizer, _NoTokenizer(name)),
        created=int(time.time()),
        fingerprint=f"{provider.name}/{entry.model or name}",
        aliases=entry.aliases,
        reasoning_format="think",  # requests may set budgets, which the provider holds
        family=provider.name,
        remote=ProviderModel(provider, entry),
    )


class _NoTokenizer:
    """The tokenizer of a model at a provider, which is not here. What would encode a text fails."""

    path = None
    chat_template = None
    infill = None
    special_ids = frozenset[int]()
    special_texts: Mapping[str, int] = MappingProxyType({})

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        raise APIError(400, f"model {self._model!r} is at a provider: its tokenizer is not here", code="no_tokenizer")


class _NoEngine:
    """Stands for the engine of a model that a provider has: lists, metrics and limits read it. It is no EngineClient,
    because a provider speaks text and an engine token ids."""

    def __init__(self, name: str, entry: ModelEntry, provider: ProviderClient) -> None:
        self._provider = provider
        self.queue = _NoQueue(provider)
        self.info = EngineInfo(
            model=name,
            revision=f"{provider.name}/{entry.model or name}",
            vocab_size=2**31 - 1,  # the provider checks ids of tokens
            max_model_len=entry.context,
            max_num_seqs=provider.entry.concurrent,
            block_size=0,
            num_blocks=(),
            dtype="",
            incarnation=0,
            pid=0,
        )

    @property
    def state(self) -> EngineState:
        return EngineState()

    def stats(self) -> EngineStats:
        return EngineStats(running=self._provider.open_requests)

    async def close(self) -> None:
        await self._provider.close()


class _NoQueue:
    """No request waits for a provider: one too many is refused."""

    tokens = 0

    def __init__(self, provider: ProviderClient) -> None:
        self._provider = provider
        self.refused = self.late = 0

    def check(self, tokens: int = 0) -> None:
        try:
            self._provider.check()
        except QueueFull:
            self.refused += 1
            raise

    def retry_after(self) -> int:
        return 1
