"""POST /v1/completions: reads requests and encodes answers."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import orjson
from msgspec.structs import replace

from penstock.frontend.answer import Codec, CollectedChoice
from penstock.frontend.call import Call, ModelContext, RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.generation import ChoiceUpdate, PromptPart, Usage
from penstock.frontend.http.body import decode
from penstock.frontend.offload import offload_if_large
from penstock.frontend.openai.events import EventFrame, encode_failure, served_fields, usage_fields
from penstock.frontend.openai.fields import CompletionFields
from penstock.frontend.openai.grammar import read_grammar
from penstock.frontend.openai.logprobs import CompletionLogprobs, prompt_logprobs
from penstock.frontend.openai.options import read_options
from penstock.frontend.requests.answer_size import check_echo_size
from penstock.frontend.requests.chat import ChatRequest, plain_text, prepare_chat
from penstock.frontend.requests.grammar import GrammarSource, check_grammar
from penstock.frontend.requests.infill import encode_infill, infill_ends
from penstock.frontend.requests.prompts import check_ids, encode_text
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.requests.sampling import GenerationOptions, check_logprobs, make_parts, output_limit
from penstock.text import OutputText

_LARGE = 64 << 10  # bytes
_DEFAULT_MAX_TOKENS = 16  # as in the OpenAI API


async def read_completion(body: bytes, context: RequestContext) -> Call:
    """Reads a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(CompletionFields, body)
    context = await context.for_model(fields.model)
    context.compare("/v1/completions", fields.model, body)
    options = read_options(fields, context.limits)
    if fields.suffix:
        options = replace(options, stop_token_ids=options.stop_token_ids + infill_ends(context.model))
    n = options.n
    _check(fields, n, context)
    large = len(body) > _LARGE  # then each step with its token ids takes some ms
    if large:
        await asyncio.sleep(0)
    prompts = _split(fields.prompt)
    if len(prompts) > context.limits.max_prompts:
        raise invalid(
            f"prompt has {len(prompts)} prompts; the limit is {context.limits.max_prompts}: send fewer", "prompt"
        )
    if len(prompts) * n > context.limits.max_sequences:
        raise invalid(
            f"{len(prompts)} prompts with n = {n} are {len(prompts) * n} sequences; the limit is "
            f"{context.limits.max_sequences}: send fewer",
            "n",
        )
    source = read_grammar(fields)
    if context.model.remote is not None:
        chat = _for_provider(fields, prompts, options, source)
        part, _ = await prepare_chat(context, chat, len(body))
        codec = CompletionCodec(context, fields, (part,), [None])
        return Call(context, (part,), codec, bool(fields.stream), "text_completion")
    grammar = None if source is None else await check_grammar(context.model, source)
    ids = []
    for prompt in prompts:
        if large:
            await asyncio.sleep(0)
        ids.append(await _encode(fields, prompt, context))
    prompt_only = fields.max_tokens == 0
    wanted = 1 if prompt_only else fields.max_tokens
    limits = [
        output_limit(context, ("prompt", len(prompt)), wanted, _DEFAULT_MAX_TOKENS, "max_tokens") for prompt in ids
    ]
    wants_prompt = fields.logprobs if fields.echo and fields.logprobs is not None else fields.prompt_logprobs
    parts = make_parts(
        context, options, ids, limits, fields.logprobs, wants_prompt, grammar=grammar, prompt_only=prompt_only
    )
    echoed = await _echoes(prompts, parts, n, context) if fields.echo else [None] * len(parts)
    return Call(context, parts, CompletionCodec(context, fields, parts, echoed), bool(fields.stream), "text_completion")


def _for_provider(
    fields: CompletionFields,
    prompts: Sequence[str | list[int]],
    options: GenerationOptions,
    grammar: GrammarSource | None,
) -> ChatRequest:
    """The request for a provider. Raises APIError 400 for more than one text."""
    prompt, *others = prompts
    if others or not isinstance(prompt, str) or fields.echo:
        message = "the model is at a provider, which takes one text as a prompt, without echo; send that"
        raise invalid(message, "prompt", "unsupported_parameter")
    return ChatRequest(
        prompt=plain_text(prompt, "prompt", fields.suffix or ""),
        options=options,
        use=ToolUse(),
        grammar=grammar,
        max_tokens=_DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )


async def _echoes(
    prompts: Sequence[str | list[int]], parts: Sequence[PromptPart], n: int, context: ModelContext
) -> Sequence["_Echo"]:
    """The prompts as the answer repeats them, `n` times each. Raises APIError 400 if that is too long, and 429."""
    check_echo_size(sum(len(prompt) for prompt in prompts if isinstance(prompt, str)), n, context.limits)
    echoes = []
    for prompt, part in zip(prompts, parts, strict=True):
        make = partial(_Echo, context, part, prompt if isinstance(prompt, str) else None)
        echoes.append(await offload_if_large(make, len(part.request.prompt_ids)))
    chars = sum(len(echo.text) for echo in echoes)
    check_echo_size(chars, n, context.limits)
    context.reserve(chars * n)
    return echoes


async def _encode(fields: CompletionFields, prompt: str | list[int], context: ModelContext) -> tuple[int, ...]:
    """The token ids of a prompt. Raises APIError 400."""
    add_special_tokens = fields.add_special_tokens is not False
    if isinstance(prompt, str) and fields.suffix:
        return await encode_infill(context.model, prompt, fields.suffix, add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        return await encode_text(context.model, prompt, add_special_tokens=add_special_tokens, param="prompt")
    if fields.suffix:
        raise invalid(
            "suffix needs a prompt that is a text; send one, or put the special tokens into its ids", "suffix"
        )
    return check_ids(context.model, prompt, "prompt")


def _check(fields: CompletionFields, n: int, context: RequestContext) -> None:
    if fields.best_of is not None and fields.best_of != n:
        raise invalid("best_of is not supported unless it equals n; leave it out", "best_of", "unsupported_parameter")
    if fields.suffix and fields.echo:
        raise invalid("echo excludes suffix, which the model reads before its answer; leave one out", "echo")
    if fields.logprobs is not None:
        check_logprobs(fields.logprobs, "logprobs", context.limits)
        if fields.echo and fields.prompt_logprobs not in (None, fields.logprobs):
            raise invalid("with echo, prompt_logprobs must equal logprobs; leave it out", "prompt_logprobs")
    if fields.max_tokens == 0 and not fields.echo:
        raise invalid("max_tokens is 0; it must be 1 or more unless echo is true", "max_tokens")


def _split(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The list of prompts in a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty; send a text, token ids, or a list of either", "prompt", "empty_prompt")
    if len(set(map(type, prompt))) > 1:
        raise invalid("prompt mixes texts, token ids and lists; send one kind", "prompt")
    if isinstance(prompt[0], int):
        return [cast(list[int], prompt)]
    return cast(list[str | list[int]], prompt)


class _Echo:
    """A prompt that the answer repeats."""

    def __init__(self, context: ModelContext, part: PromptPart, text: str | None) -> None:
        output = OutputText(context.model.tokenizer, (), skip_special_tokens=part.skip_special_tokens)
        chunk = output.push(part.request.prompt_ids)
        self.text = chunk.text + output.finish().text if text is None else text
        self.offsets = chunk.offsets


class CompletionCodec(Codec):
    def __init__(
        self,
        context: ModelContext,
        fields: CompletionFields,
        parts: tuple[PromptPart, ...],
        echoed: Sequence[_Echo | None],
    ) -> None:
        self._tokenizer = context.model.tokenizer
        self._n = parts[0].request.n
        self._logprobs = fields.logprobs
        self._prompt_logprobs = fields.prompt_logprobs
        self._parts = parts
        self._echoed = echoed
        self._begun: set[int] = set()  # choices whose prompt has been echoed
        self._rows_of_prompts: dict[int, Any] = {}  # by part: the prompt's logprobs, formatted
        self._echoed_rows: dict[int, CompletionLogprobs] = {}  # by part: the same in the shape of an echoed prompt
        event_fields = {"id": f"cmpl-{context.id}", "object": "text_completion", **served_fields(context)}
        self._frame = EventFrame(event_fields, fields.stream_options)
        self._heads = [self._frame.head(index) + b'"text":' for index in range(len(parts) * self._n)]

    def chunk(self, update: ChoiceUpdate, usage: Usage) -> bytes:
        index, text = update.choice, update.text
        echo = self._echoed[index // self._n]
        logprobs = b"null"
        begins = echo is not None and index not in self._begun
        if self._logprobs is not None and (update.logprobs or begins):
            logprobs = orjson.dumps(self._logprob_fields(update, begins))
        if begins and echo is not None:
            self._begun.add(index)
            text = echo.text + text
        reason = update.finish_reason
        if not text and reason is None and logprobs == b"null":
            return b""
        return b"".join(
            (
                *(self._heads[index], orjson.dumps(text), b',"logprobs":', logprobs),
                *(b',"finish_reason":', orjson.dumps(reason), self._frame.tail(usage)),
            )
        )

    def closing(self, usage: Usage) -> bytes:
        return self._frame.closing(usage)

    def failure(self, error: APIError) -> bytes:
        return encode_failure(error)

    def whole(self, answers: list[CollectedChoice], usage: Usage) -> bytes:
        choices = [self._choice(answer) for answer in answers]
        return orjson.dumps({**self._frame.fields, "choices": choices, "usage": usage_fields(usage)})

    def _choice(self, answer: CollectedChoice) -> dict[str, Any]:
        echo = self._echoed[answer.choice // self._n]
        choice: dict[str, Any] = {
            "index": answer.choice,
            "text": answer.text if echo is None else echo.text + answer.text,
            "logprobs": None if self._logprobs is None else self._logprob_fields(answer, echo is not None),
            "finish_reason": answer.finish_reason,
        }
        if self._prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._prompt_rows(answer, self._prompt_logprobs)
        return choice

    def _prompt_rows(self, answer: CollectedChoice, k: int) -> Any:
        """The logprobs of a choice's prompt, formatted once for all choices of that prompt."""
        part = answer.choice // self._n
        if part not in self._rows_of_prompts:
            prompt_ids = self._parts[part].request.prompt_ids
            self._rows_of_prompts[part] = prompt_logprobs(self._tokenizer, prompt_ids, answer.prompt_logprobs, k)
        return self._rows_of_prompts[part]

    def _logprob_fields(self, source: ChoiceUpdate | CollectedChoice, begins: bool) -> dict[str, Any]:
        """The logprobs of an update or a choice, after those of an echoed prompt if the text begins with it."""
        rows = CompletionLogprobs(self._tokenizer, self._logprobs or 0)
        part = source.choice // self._n
        echo = self._echoed[part]
        if begins and echo is not None:
            if part not in self._echoed_rows:
                prompt = CompletionLogprobs(self._tokenizer, self._logprobs or 0)
                prompt.add_prompt(self._parts[part].request.prompt_ids, source.prompt_logprobs, echo.offsets)
                self._echoed_rows[part] = prompt
            rows.extend(self._echoed_rows[part])
        rows.add(source.logprobs, source.offsets if source.logprobs else (), len(echo.text) if echo is not None else 0)
        return rows.fields()
