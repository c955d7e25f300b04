"""POST /api/generate."""

import asyncio

import msgspec
from msgspec.structs import replace

from penstock.frontend.call import Call, ModelContext, RequestContext
from penstock.frontend.generation import PromptPart
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.ollama.codec import OllamaCodec
from penstock.frontend.ollama.fields import GenerateFields
from penstock.frontend.ollama.options import (
    answer_nothing,
    enter_model,
    max_tokens,
    read_format,
    read_logprobs,
    read_options,
    read_request,
    read_think,
)
from penstock.frontend.requests.answer_size import most_tokens
from penstock.frontend.requests.chat import ChatMessages, prepare_chat
from penstock.frontend.requests.grammar import check_grammar
from penstock.frontend.requests.infill import encode_infill, infill_ends
from penstock.frontend.requests.prompts import check_ids, encode_text, tokens_left
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.requests.sampling import make_parts, output_limit

_decoder = msgspec.json.Decoder(GenerateFields)


async def read_generate(body: bytes, context: RequestContext) -> Call | Answer:
    """Reads a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(_decoder, body)
    if not fields.prompt and not fields.suffix:
        refuse_unsupported(fields)
        return await answer_nothing(fields, {"response": ""}, context)
    context = await enter_model(context, fields.model, fields.keep_alive)
    refuse_unsupported(fields)
    streams = fields.stream is not False
    prompt = fields.prompt or ""
    if fields.raw or fields.suffix:
        part = await _raw_part(fields, context, prompt)
        codec = OllamaCodec(context, fields.model, part, None, chat=False)
        return Call(context, (part,), codec, streams, "text_completion")
    system = [{"role": "system", "content": fields.system}] if fields.system else []
    if fields.context:
        await asyncio.sleep(0)  # to decode and to check many token ids take 3 ms each
    earlier = check_ids(context.model, fields.context, "context") if fields.context else ()
    messages = ChatMessages(
        messages=[*system, {"role": "user", "content": prompt}],
        variables=read_think(fields),
        earlier_ids=earlier,
        param="prompt",
    )
    chat = read_request(fields, messages, ToolUse(), context.limits)
    part, reader = await prepare_chat(context, chat, len(body))
    thinking = fields.think is not False
    codec = OllamaCodec(context, fields.model, part, reader, chat=False, thinking=thinking, returns_context=True)
    return Call(context, (part,), codec, streams, "text_completion")


async def _raw_part(fields: GenerateFields, context: ModelContext, prompt: str) -> PromptPart:
    """The part of a prompt that is not put into the chat template: a raw one, or one with a suffix."""
    options, k = read_options(fields, context.limits), read_logprobs(fields, context.limits)
    if fields.suffix:
        ids = await encode_infill(context.model, prompt, fields.suffix, add_special_tokens=True)
        options = replace(options, stop_token_ids=options.stop_token_ids + infill_ends(context.model))
    else:
        ids = await encode_text(context.model, prompt, add_special_tokens=True, param="prompt")
    wanted, left = max_tokens(fields), tokens_left(context.model, len(ids), "prompt")
    limit = output_limit(
        context,
        ("prompt", len(ids)),
        None if wanted is None else min(wanted, left),
        most_tokens(options.n, k, context.limits),
        "options.num_predict",
    )
    source = read_format(fields)
    grammar = None if source is None else await check_grammar(context.model, source)
    (part,) = make_parts(context, options, [ids], [limit], k, None, grammar=grammar)
    return part
