"""Ollama's routes about models. The server has one model, which is always loaded."""

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
import orjson

from penstock.frontend.call import RequestContext
from penstock.frontend.errors import APIError, invalid
from penstock.frontend.http.asgi import Answer
from penstock.frontend.http.body import decode
from penstock.frontend.ollama.codec import NDJSON
from penstock.frontend.ollama.fields import ModelFields
from penstock.frontend.ollama.options import SAMPLING_NAMES, check_model
from penstock.frontend.served import ServedModel

VERSION = "0.12.6"  # of the Ollama whose API this is: clients compare it
_NEVER = "2318-01-01T00:00:00Z"  # when the model is unloaded
_decoder = msgspec.json.Decoder(ModelFields)


async def greet(body: bytes, context: RequestContext) -> Answer:
    """Clients read this text to find out whether Ollama runs."""
    return Answer(b"Ollama is running", content_type=b"text/plain; charset=utf-8")


async def show_version(body: bytes, context: RequestContext) -> bytes:
    return orjson.dumps({"version": VERSION})


async def list_models(body: bytes, context: RequestContext) -> bytes:
    """The model's names."""
    model = context.model
    return orjson.dumps({"models": [_fields(model, name) for name in (model.name, *model.aliases)]})


async def list_running(body: bytes, context: RequestContext) -> bytes:
    """The loaded models."""
    model = context.model
    more = {"expires_at": _NEVER, "size_vram": 0, "context_length": model.max_model_len}
    return orjson.dumps({"models": [{**_fields(model, model.name), **more}]})


async def show_model(body: bytes, context: RequestContext) -> bytes:
    """What is known about the model. Raises APIError 404 for another one."""
    model = context.model
    _check(body, context)
    template = model.tokenizer.chat_template
    capabilities = ["completion" if model.pooling is None else "embedding"]
    if template is not None and model.conversation.tools is not None:
        capabilities.append("tools")
    if model.tokenizer.infill is not None:
        capabilities.append("insert")
    if model.conversation.reasoning is not None:
        capabilities.append("thinking")
    return orjson.dumps(
        {
            "modelfile": f"FROM {model.name}",
            "parameters": "\n".join(
                f"{name} {model.defaults[ours]}" for name, ours in SAMPLING_NAMES.items() if ours in model.defaults
            ),
            "template": "" if template is None else template.source,
            "details": _details(model),
            "model_info": {"general.architecture": "penstock", "penstock.context_length": model.max_model_len},
            "capabilities": capabilities,
            "modified_at": _created(model),
        }
    )


async def pull(body: bytes, context: RequestContext) -> Answer:
    """Success for the served model. Raises APIError 403 for another one."""
    fields = _fields_of(body)
    try:
        _check(body, context)
    except APIError as error:
        raise APIError(403, f"{error.message}; download others with penstock pull", param="model") from None
    done = orjson.dumps({"status": "success"})
    return Answer(done) if fields.stream is False else Answer(done + b"\n", content_type=NDJSON)


async def delete(body: bytes, context: RequestContext) -> bytes:
    """Raises APIError 403 for the served model, and 404 for another one."""
    _check(body, context)
    raise APIError(403, f"model {context.model.name!r} is in use; delete models with penstock rm", param="model")


def _check(body: bytes, context: RequestContext) -> None:
    fields = _fields_of(body)
    name = fields.model or fields.name
    if name is None:
        raise invalid("model is missing", "model", "missing_parameter")
    check_model(context.model, name)


def _fields_of(body: bytes) -> ModelFields:
    return decode(_decoder, body)


def _fields(model: ServedModel, name: str) -> dict[str, Any]:
    shown = name if ":" in name else f"{name}:latest"
    return {
        "name": shown,
        "model": shown,
        "modified_at": _created(model),
        "size": 0,
        "digest": hashlib.sha256(f"{model.name}@{model.client.info.revision}".encode()).hexdigest(),
        "details": _details(model),
    }


def _details(model: ServedModel) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "penstock",
        "families": ["penstock"],
        "parameter_size": "",
        "quantization_level": model.client.info.dtype,
    }


def _created(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat()
