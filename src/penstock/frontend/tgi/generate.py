"""POST /generate, /generate_stream and /."""

import msgspec

from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import digits, invalid, unavailable
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.requests.chat import ChatRequest, plain_text, prepare_chat
from penstock.frontend.requests.grammar import GrammarSource
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.requests.sampling import (
    GenerationOptions,
    check_logprobs,
    check_options,
    given_sampling,
    stop_strings,
)
from penstock.frontend.tgi.codec import GenerateCodec
from penstock.frontend.tgi.fields import GenerateFields, GrammarFields, Parameters

_DEFAULT_MAX_TOKENS = 100  # as in TGI
_OF_TOKENS = ("decoder_input_details", "top_n_tokens", "truncate")  # parameters that providers lack


async def read_generate(body: bytes, context: RequestContext) -> Call:
    """Reads a request for a whole answer. Raises APIError 400 that names the parameter."""
    return await _read(decode(GenerateFields, body), context, streams=False)


async def read_stream(body: bytes, context: RequestContext) -> Call:
    """Reads a request for a stream. Raises APIError 400 that names the parameter."""
    return await _read(decode(GenerateFields, body), context, streams=True)


async def read_any(body: bytes, context: RequestContext) -> Call:
    """Reads a request that says whether it is for a stream. A whole answer is then in a list."""
    fields = decode(GenerateFields, body)
    return await _read(fields, context, streams=bool(fields.stream), in_list=True)


async def _read(fields: GenerateFields, context: RequestContext, *, streams: bool, in_list: bool = False) -> Call:
    context = await context.for_model(None)  # TGI's requests name no model
    given = fields.parameters or Parameters()
    refuse_unsupported(given, "parameters.")
    samples = given.do_sample or given.top_k is not None or given.top_p is not None
    sampling = {"temperature": 1.0 if samples else 0.0, **given_sampling(given)}
    remote = context.model.remote is not None
    for name in _OF_TOKENS if remote else ():
        if getattr(given, name):
            raise unavailable(f"parameters.{name}")
    # TGI's text ends with the stop string, which providers do not send.
    options = GenerationOptions(
        stop=stop_strings(given.stop), include_stop=not remote, seed=given.seed, sampling=sampling
    )
    check_options(options, context.limits)
    k = given.top_n_tokens or 0
    check_logprobs(k, "parameters.top_n_tokens", context.limits)
    if given.decoder_input_details and streams:
        name = "parameters.decoder_input_details"
        raise invalid(f"{name} is not available in a stream; ask for a whole answer", name)
    if given.truncate is not None and given.truncate < 1:
        shown = digits(given.truncate)
        raise invalid(f"parameters.truncate is {shown}; it must be 1 or more", "parameters.truncate")
    chat = ChatRequest(
        prompt=plain_text(fields.inputs, "inputs", last_tokens=given.truncate),
        options=options,
        use=ToolUse(),
        grammar=None if given.grammar is None else _grammar(given.grammar),
        max_tokens=_DEFAULT_MAX_TOKENS if given.max_new_tokens is None else given.max_new_tokens,
        max_tokens_param="parameters.max_new_tokens",
        shorten=given.max_new_tokens is None,
        logprobs=None if remote else k,
        prompt_logprobs=0 if given.details and given.decoder_input_details else None,
    )
    part, _ = await prepare_chat(context, chat, len(fields.inputs))
    codec = GenerateCodec(
        context,
        part,
        details=bool(given.details),
        top=k > 0,
        echo=fields.inputs if given.return_full_text else "",
        in_list=in_list,
    )
    return Call(context, (part,), codec, streams, "text_completion")


def _grammar(wanted: GrammarFields) -> GrammarSource:
    """The grammar of an answer. Raises APIError 400 for an unknown kind."""
    param = "parameters.grammar.value"
    raw = bytes(wanted.value)
    match wanted.type:
        case "regex" if raw.startswith(b'"'):
            return GrammarSource("regex", msgspec.json.decode(raw, type=str), param)
        case "json" if raw.startswith(b"{"):
            return GrammarSource("json_schema", raw.decode(), param)
        case "json_schema" if raw.startswith(b"{"):
            schema = bytes(msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("schema", b""))
            if schema.startswith(b"{"):
                return GrammarSource("json_schema", schema.decode(), f"{param}.schema")
    raise invalid(
        "parameters.grammar must have the type json with a schema, json_schema with an object that has a schema, or "
        "regex with a string",
        "parameters.grammar",
    )
