"""POST /v1/messages and /v1/messages/count_tokens."""

import orjson

from penstock.frontend.anthropic.codec import MessageCodec
from penstock.frontend.anthropic.fields import MessageFields, PromptFields
from penstock.frontend.anthropic.prompt import read_grammar, read_prompt, read_tools, shows_thinking, thinking_budget
from penstock.frontend.call import Call, RequestContext
from penstock.frontend.http.body import decode
from penstock.frontend.requests.chat import ChatRequest, encode_messages, prepare_chat
from penstock.frontend.requests.sampling import GenerationOptions, check_options, given_sampling, stop_strings


async def read_message(body: bytes, context: RequestContext) -> Call:
    """Reads a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(MessageFields, body)
    context = await context.for_model(fields.model)
    options = GenerationOptions(
        stop=stop_strings(fields.stop_sequences), seed=fields.seed, sampling=given_sampling(fields)
    )
    check_options(options, context.limits)
    use = read_tools(fields, context.model, context.limits)
    chat = ChatRequest(
        prompt=await read_prompt(fields, context.limits, use),
        options=options,
        use=use,
        grammar=read_grammar(fields),
        max_tokens=fields.max_tokens,
        shorten=True,  # clients send the most that Anthropic's models take
        thinking_budget=thinking_budget(fields, context.model),
    )
    part, reader = await prepare_chat(context, chat, len(body))
    shortened = part.request.sampling.max_tokens < fields.max_tokens
    edits = fields.context_management is not None
    codec = MessageCodec(context, reader, thinking=shows_thinking(fields), shortened=shortened, edits=edits)
    return Call(context, (part,), codec, bool(fields.stream), "chat")


async def count_tokens(body: bytes, context: RequestContext) -> bytes:
    """The number of a prompt's tokens. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(PromptFields, body)
    context = await context.for_model(fields.model)
    use = read_tools(fields, context.model, context.limits)
    prompt = await encode_messages(context, await read_prompt(fields, context.limits, use), len(body))
    return orjson.dumps({"input_tokens": len(prompt.ids)})
