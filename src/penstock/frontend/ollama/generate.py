"""POST /api/generate."""

import asyncio

from penstock.frontend.call import Call, RequestContext
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.ollama.codec import OllamaCodec
from penstock.frontend.ollama.fields import GenerateFields
from penstock.frontend.ollama.options import answer_nothing, enter_model, read_request, read_think
from penstock.frontend.requests.chat import ChatMessages, plain_text, prepare_chat
from penstock.frontend.requests.prompts import check_ids
from penstock.frontend.requests.reply import ToolUse


async def read_generate(body: bytes, context: RequestContext) -> Call | Answer:
    """Reads a request. Raises APIError 400 or 404 that names the parameter."""
    fields = decode(GenerateFields, body)
    if not fields.prompt and not fields.suffix:
        refuse_unsupported(fields)
        return await answer_nothing(fields, {"response": ""}, context)
    context = await enter_model(context, fields.model, fields.keep_alive)
    refuse_unsupported(fields)
    prompt, plain = fields.prompt or "", bool(fields.raw or fields.suffix)
    if plain:
        messages = plain_text(prompt, "prompt", fields.suffix or "")
    else:
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        if fields.context:
            await asyncio.sleep(0)  # to decode and to check many token ids take 3 ms each
        messages = ChatMessages(
            messages=[*system, {"role": "user", "content": prompt}],
            variables=read_think(fields),
            earlier_ids=check_ids(context.model, fields.context, "context") if fields.context else (),
            param="prompt",
        )
    chat = read_request(fields, messages, ToolUse(), context.limits)
    part, reader = await prepare_chat(context, chat, len(body))
    thinking = fields.think is not False
    codec = OllamaCodec(context, fields.model, part, reader, chat=False, thinking=thinking, returns_context=not plain)
    return Call(context, (part,), codec, fields.stream is not False, "text_completion")
