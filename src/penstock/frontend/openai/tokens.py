"""POST /tokenize and /detokenize, and GET /tokenizer_info, as in vLLM."""

import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import digits, invalid
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.offload import offload_if_large
from penstock.frontend.openai.chat import read_messages
from penstock.frontend.openai.fields import DetokenizeFields, TokenizeFields
from penstock.frontend.requests.chat import encode_messages
from penstock.frontend.requests.prompts import encode_text
from penstock.frontend.requests.tools import check_tools

_COUNTED = 32768  # tokens that may be counted with any context


async def tokenize(body: bytes, context: RequestContext) -> bytes:
    """Answers a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(TokenizeFields, body)
    context = await context.for_model(fields.model)
    refuse_unsupported(fields)
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid("send either prompt or messages", "prompt", "missing_parameter")
    if fields.prompt is not None:
        special = fields.add_special_tokens is not False
        ids = await encode_text(context.model, fields.prompt, add_special_tokens=special, param="prompt", most=_COUNTED)
    else:
        tools = check_tools(fields.tools, context.limits)
        messages = await read_messages(fields, context.limits, list(tools.values()))
        ids = (await encode_messages(context, messages, len(body))).ids

    def answer() -> bytes:
        strings = [context.model.tokenizer.token(token_id) for token_id in ids] if fields.return_token_strs else None
        return orjson.dumps(
            {"count": len(ids), "max_model_len": context.model.max_model_len, "tokens": ids, "token_strs": strings}
        )

    return await offload_if_large(answer, len(ids))


async def detokenize(body: bytes, context: RequestContext) -> bytes:
    """Answers a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(DetokenizeFields, body)
    context = await context.for_model(fields.model)
    vocab_size = context.model.client.info.vocab_size

    def answer() -> bytes:
        for i, token_id in enumerate(fields.tokens):
            if not 0 <= token_id < vocab_size:
                raise invalid(
                    f"tokens[{i}] is {digits(token_id)}; ids of {context.model.name!r} are 0 to {vocab_size - 1}",
                    f"tokens[{i}]",
                )
        return orjson.dumps({"prompt": context.model.tokenizer.decode(fields.tokens, skip_special_tokens=False)})

    return await offload_if_large(answer, len(fields.tokens))


async def tokenizer_info(body: bytes, context: RequestContext) -> bytes:
    """Returns the facts from which a client makes prompts of token ids by itself, named as in tokenizer_config.json."""
    model = (await context.for_model(None)).model
    tokenizer = model.tokenizer
    template = tokenizer.chat_template
    return orjson.dumps(
        {
            "bos_token": None if tokenizer.bos_token_id is None else tokenizer.token(tokenizer.bos_token_id),
            "eos_token": None if tokenizer.eos_token_id is None else tokenizer.token(tokenizer.eos_token_id),
            "model_max_length": model.max_model_len,
            "chat_template": None if template is None else template.plain_source,
        }
    )
