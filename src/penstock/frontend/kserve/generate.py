"""POST /v2/models/{model}/generate and generate_stream."""

from typing import Any

from penstock.frontend.call import Call, ModelContext, RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.body import decode
from penstock.frontend.kserve.codec import GenerateCodec
from penstock.frontend.kserve.fields import GenerateFields, Parameters
from penstock.frontend.requests.chat import ChatRequest, plain_text, prepare_chat
from penstock.frontend.requests.reply import ToolUse
from penstock.frontend.requests.sampling import GenerationOptions, check_options, given_sampling, stop_strings
from penstock.messages.tensors import NotReady, TensorModel, TensorModels

VERSION = "1"  # of each model
NO_REPOSITORY = "this server has no repository of models: start it with --repository DIR"
_DEFAULT_MAX_TOKENS = 16  # as in vLLM


async def read_generate(body: bytes, context: RequestContext) -> Call:
    """Reads a request for a whole answer. Raises APIError 400 or 404 that names the parameter."""
    return await _read(body, context, streams=False)


async def read_stream(body: bytes, context: RequestContext) -> Call:
    """Reads a request for a stream. Raises APIError 400 or 404 that names the parameter."""
    return await _read(body, context, streams=True)


async def for_path(context: RequestContext) -> tuple[ModelContext, str]:
    """Returns the context with the model in the path, and its name there. Raises APIError 404 for a model or version
    that is not served."""
    name = context.path["model"]
    found = await context.for_model(name)
    version = context.path.get("version", VERSION)
    if version != VERSION:
        raise APIError(404, f"version {version[:40]!r} is not served here; this server has version {VERSION!r}")
    return found, name


def one_shot_model(context: RequestContext) -> TensorModel | None:
    """Returns the one-shot model in the path; None if it is none. Raises APIError 404 for one that is not ready."""
    version = context.path.get("version", "")
    return find_one_shot(context.models.tensors, context.path["model"], version, context.session_key())


def find_one_shot(models: TensorModels | None, name: str, version: str, key: str = "") -> TensorModel | None:
    """Returns a one-shot model; None if it is none. `key`: see TensorModels. Raises APIError 404 for one that is not
    ready."""
    try:
        return None if models is None else models.find(name, version, key)
    except NotReady as error:
        raise APIError(404, str(error), code="model_not_ready") from None


def repository_of(context: RequestContext) -> TensorModels | None:
    """Returns the repository, for the operator; None if there is none. Raises APIError 403 for a path that was
    admitted as another one."""
    if context.models.tensors is not None and not context.admin:
        raise APIError(403, "write the path without % signs", code="admin_key_required")
    return context.models.tensors


async def read_text(
    text: str,
    parameters: Parameters,
    context: RequestContext,
    codec: type[GenerateCodec],
    answer_id: str | None,
    streams: bool,
) -> Call:
    """Returns the call for a text. Raises APIError 400 that names the parameter."""
    context, name = await for_path(context)
    if answer_id is not None and len(answer_id) > context.limits.max_id_chars:
        raise invalid(
            f"id has {len(answer_id)} characters; the limit is {context.limits.max_id_chars}: shorten it", "id"
        )
    options = GenerationOptions(
        stop=stop_strings(parameters.stop), seed=parameters.seed, sampling=given_sampling(parameters)
    )
    check_options(options, context.limits)
    chat = ChatRequest(
        prompt=plain_text(text, "text_input"),
        options=options,
        use=ToolUse(),
        max_tokens=_DEFAULT_MAX_TOKENS if parameters.max_tokens is None else parameters.max_tokens,
        shorten=parameters.max_tokens is None,
    )
    part, _ = await prepare_chat(context, chat, len(text))
    head: dict[str, Any] = {"model_name": name, "model_version": VERSION}
    if answer_id is not None:
        head["id"] = answer_id
    echo = text if parameters.exclude_input_in_output is False else ""
    return Call(context, (part,), codec(head, echo), streams, "text_completion")


async def _read(body: bytes, context: RequestContext, *, streams: bool) -> Call:
    fields = decode(GenerateFields, body)
    beside = {name: value for name in Parameters.__struct_fields__ if (value := getattr(fields, name)) is not None}
    parameters = fields.parameters or Parameters()
    for name, value in beside.items():
        if getattr(parameters, name) not in (None, value):
            raise invalid(f"{name} and parameters.{name} differ; send one of them", name)
        setattr(parameters, name, value)
    return await read_text(fields.text_input, parameters, context, GenerateCodec, fields.id, streams)
