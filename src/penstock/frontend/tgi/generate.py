"""POST /generate, /generate_stream and /."""

import msgspec

from penstock.frontend.call import Call, RequestContext
from penstock.frontend.errors import digits, invalid
from penstock.frontend.http.body import decode, refuse_unsupported
from penstock.frontend.requests.grammar import GrammarSource, check_grammar
from penstock.frontend.requests.prompts import encode_text
from penstock.frontend.requests.sampling import (
    GenerationOptions,
    check_logprobs,
    check_options,
    given_sampling,
    make_parts,
    output_limit,
    stop_strings,
)
from penstock.frontend.tgi.codec import GenerateCodec
from penstock.frontend.tgi.fields import GenerateFields, GrammarFields, Parameters

_DEFAULT_MAX_TOKENS = 100  # as in TGI
_decoder = msgspec.json.Decoder(GenerateFields)


async def read_generate(body: bytes, context: RequestContext) -> Call:
    """Reads a request for a whole answer. Raises APIError 400 that names the parameter."""
    return await _read(decode(_decoder, body), context, streams=False)


async def read_stream(body: bytes, context: RequestContext) -> Call:
    """Reads a request for a stream. Raises APIError 400 that names the parameter."""
    return await _read(decode(_decoder, body), context, streams=True)


async def read_any(body: bytes, context: RequestContext) -> Call:
    """Reads a request that says whether it is for a stream. A whole answer is then in a list."""
    fields = decode(_decoder, body)
    return await _read(fields, context, streams=bool(fields.stream), in_list=True)


async def _read(fields: GenerateFields, context: RequestContext, *, streams: bool, in_list: bool = False) -> Call:
    context = await context.for_model(None)  # TGI's requests name no model
    given = fields.parameters or Parameters()
    refuse_unsupported(given, "parameters.")
    samples = given.do_sample or given.top_k is not None or given.top_p is not None
    sampling = {"temperature": 1.0 if samples else 0.0, **given_sampling(given)}
    # TGI's text ends with the stop string.
    options = GenerationOptions(stop=stop_strings(given.stop), include_stop=True, seed=given.seed, sampling=sampling)
    check_options(options, context.limits)
    k = given.top_n_tokens or 0
    check_logprobs(k, "parameters.top_n_tokens", context.limits)
    if given.decoder_input_details and streams:
        name = "parameters.decoder_input_details"
        raise invalid(f"{name} is not available in a stream; ask for a whole answer", name)
    ids = await encode_text(context.model, fields.inputs, add_special_tokens=True, param="inputs")
    if given.truncate is not None:
        if given.truncate < 1:
            shown = digits(given.truncate)
            raise invalid(f"parameters.truncate is {shown}; it must be 1 or more", "parameters.truncate")
        ids = ids[-given.truncate :]
    prompt = ("inputs", len(ids))
    limit = output_limit(context, prompt, given.max_new_tokens, _DEFAULT_MAX_TOKENS, "parameters.max_new_tokens")
    source = None if given.grammar is None else _grammar(given.grammar)
    grammar = None if source is None else await check_grammar(context.model, source)
    wants_prompt = 0 if given.details and given.decoder_input_details else None
    parts = make_parts(context, options, [ids], [limit], k, wants_prompt, grammar=grammar)
    codec = GenerateCodec(
        context,
        parts[0],
        details=bool(given.details),
        top=k > 0,
        echo=fields.inputs if given.return_full_text else "",
        in_list=in_list,
    )
    return Call(context, parts, codec, streams, "text_completion")


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
